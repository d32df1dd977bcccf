"""``GET /metrics`` and ``/status``: this API server's counters and the latest ones of every other process."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

from penstock.api.api_request import ApiRequest
from penstock.api.routes.fleet_status import about_template, fleet_status
from penstock.dispatch.engine_client import EngineClient
from penstock.generation.input_processor import InputProcessor
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.turn_memory import TurnMemory
from penstock.http.errors import encode_json
from penstock.metrics import families as f
from penstock.metrics.api_server_metrics import ApiServerMetrics
from penstock.metrics.exposition import CONTENT_TYPE, exposition
from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.merge import Totals
from penstock.metrics.shared_exposition import SharedExposition, in_slices
from penstock.metrics.snapshot import Distribution, Labels, Series, Snapshot, process_name, process_series
from penstock.streaming.engine_faults import FAULTS
from penstock.streaming.output_processor import OutputProcessor
from penstock.wire.control import Launch
from penstock.wire.messages import CACHE_CONFIG_LABELS


class MetricSources(NamedTuple):
    """The parts of an API server whose counts are shown."""

    metrics: ApiServerMetrics
    engine_client: EngineClient
    streams: OutputProcessor
    input_processor: InputProcessor
    collector: GarbageCollector
    clients: Callable[[], tuple[int, int]]
    """Returns the number of open connections and the reply bytes that wait for them."""
    turns: TurnMemory
    spans: Mapping[str, int] | None = None
    """Numbers of spans by state; None: none are made."""


class MetricsEndpoint:
    """Merges the metrics of all processes, as one API server knows them."""

    def __init__(
        self,
        launch: Launch,
        sources: MetricSources,
        *,
        template: ChatTemplate | None,
        refresh: Callable[[Snapshot], Awaitable[None]],
        share: Callable[[Snapshot], Awaitable[None]],
    ) -> None:
        """``template``: of the model. ``refresh`` takes the metrics of the other API
        servers and of the engines as of now; ``share`` gives this API server's metrics to the others before
        they are shown, and takes theirs."""
        self._launch = launch
        self._server = str(launch.index)
        self._process = process_name("api-server", launch.index)
        self._models = sources.input_processor.model_info.names
        self._model = self._models[0]
        """The name that metrics have."""
        self._about_template = cache(partial(about_template, template))
        self._metrics = sources.metrics
        self._engine_client = sources.engine_client
        self._streams = sources.streams
        self._input_processor = sources.input_processor
        self._collector = sources.collector
        self._clients = sources.clients
        self._turns = sources.turns
        self._spans = sources.spans
        self._refresh = refresh
        self._share = share
        self._sequence = 0
        self._exposition = SharedExposition(self._expose)
        self._status = SharedExposition(self._show_status)

    def snapshot(self) -> Snapshot:
        """This API server's own families."""
        self._sequence += 1
        return Snapshot(
            process=self._process,
            epoch=self._launch.epoch,
            sequence=self._sequence,
            series=list(self._series()),
            incarnation=self._launch.incarnation,
        )

    def totals(self, own: Snapshot | None = None) -> Totals:
        """Totals over all known processes; gauges of engines are those of their latest frame. ``own``: a
        :meth:`snapshot`; None: one of this moment."""
        found = self._engine_client.board.totals(own or self.snapshot())
        for engine in self._engine_client.engines:
            labels = self._model, str(engine.rank)
            for family, value in (
                (f.RUNNING, engine.running),
                (f.WAITING, engine.waiting),
                (f.KV_USAGE, engine.kv_used),
                (f.UP, engine.up),
                (f.DRAINING, engine.draining),
            ):
                found.setdefault(family.name, {})[labels] = float(value)
            for empty in (f.PARAMS_N, f.MAX_GENERATION_TOKENS):  # no request has ended there
                none = Distribution((0,) * (len(empty.bounds) + 1), 0.0)
                found.setdefault(empty.name, {}).setdefault(labels, none)
            deferred = min(engine.deferred, engine.waiting)
            for reason, count in (("capacity", engine.waiting - deferred), ("deferred", deferred)):
                found.setdefault(f.WAITING_BY_REASON.name, {})[*labels, reason] = float(count)
            if engine.weight_version is not None:
                version = (*labels, engine.weight_version)
                found.setdefault(f.WEIGHTS.name, {})[version] = float(engine.weights_status.generation)
            if engine.host:
                found.setdefault(f.ENGINE_INFO.name, {})[*labels, engine.host] = 1.0
            if engine.info is not None and engine.info.cache_config:
                cache = tuple(engine.info.cache_config.get(name, "") for name in CACHE_CONFIG_LABELS)
                found.setdefault(f.CACHE_CONFIG.name, {})[*labels, *cache] = 1.0
        if self._has_adapters():
            found[f.LORA_REQUESTS.name] = {self._adapters(found): time.time()}
        return found

    def _has_adapters(self) -> bool:
        return any(engine.info is not None and engine.info.lora for engine in self._engine_client.engines)

    def _adapters(self, found: Totals) -> Labels:
        """Labels of vLLM's series for gateways that route by adapter. There is one series for all engines:
        gateways read only the newest."""
        streams = found.get(f.ADAPTER_STREAMS.name, {})
        waiting, running = (
            ",".join(sorted({adapter for _, adapter, state in streams if state == wanted}))
            for wanted in ("waiting", "running")
        )
        up = [engine.info for engine in self._engine_client.engines if engine.up and engine.info is not None]
        return str(sum(info.lora.max_loras for info in up if info.lora is not None)), waiting, running

    async def metrics(self, request: ApiRequest) -> None:
        """The handler of ``/metrics``."""
        await request.http.reply_json(await self._exposition.get(), kind=CONTENT_TYPE.encode())

    async def status(self, request: ApiRequest) -> None:
        """The handler of ``/status``."""
        await request.http.reply_json(await self._status.get())

    async def _expose(self) -> bytes:
        return b"".join(await in_slices(exposition(await self._shared_totals())))

    async def _show_status(self) -> bytes:
        totals = await self._shared_totals()
        return encode_json(fleet_status(totals, self._engine_client, self._models, self._about_template()))

    async def _shared_totals(self) -> Totals:
        """Families that every API server would show, as of now."""
        await self._refresh(self.snapshot())
        own = self.snapshot()
        await self._share(own)
        return self.totals(own)

    def _series(self) -> Iterator[Series]:
        server = self._server
        yield from self._metrics.series(server, self._model)
        for field, count in self._input_processor.unknown_fields().items():
            yield Series(f.UNKNOWN_FIELDS.name, (server, field), count)
        for engine in self._engine_client.engines:
            for reason in FAULTS:
                count = self._engine_client.faults.counts[engine.rank, reason]
                yield Series(f.ENGINE_FAULTS.name, (server, str(engine.rank), reason), count)
        connections, queued = self._clients()
        for result, count in (("hit", self._turns.hits), ("miss", self._turns.misses)):
            yield Series(f.TURNS.name, (server, result), count)
        for family, value in (
            (f.TURN_BYTES, self._turns.bytes),
            (f.CONNECTIONS, connections),
            (f.BYTES_QUEUED, queued),
            (f.STREAMS, len(self._streams)),
            (f.DELIVERED, self._streams.generated_tokens - self._streams.discarded_tokens),
            (f.DISCARDED, self._streams.discarded_tokens),
            (f.FRAMES, self._engine_client.frames_received),
            (f.FRAMES_MERGED, self._engine_client.frames_merged),
        ):
            yield Series(family.name, (server,), value)
        if self._has_adapters():
            for (adapter, state), count in self._streams.adapter_counts().items():
                yield Series(f.ADAPTER_STREAMS.name, (server, adapter, state), count)
        yield from process_series(self._process, self._launch.restarts, self._collector.pauses, self._spans)
