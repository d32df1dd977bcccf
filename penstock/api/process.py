"""The API server process: builds its parts and follows the supervisor's commands.

The supervisor starts it with the listening socket or, if there are several API servers, with a socket over
which it receives accepted connections. It owns HTTP connections, streams, tokenizer and detokenizer. It reads
requests, token frames and commands; it writes events, replies, submits and aborts. It takes connections after
AcceptConnections: until then the supervisor answers them. After Drain it ends when
its requests have ended; after Stop, or when the supervisor is gone, it ends at once. It answers new
connections until it ends, unless another API server has replaced it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from penstock.api.app import App
from penstock.api.background import BackgroundResponses
from penstock.api.byte_budget import ByteBudget
from penstock.api.generate import GenerationRoutes
from penstock.api.planning import THREADS_BYTES
from penstock.api.pool import PoolingRoutes
from penstock.api.request_spans import describe
from penstock.api.routes.adapters import AdapterRoutes
from penstock.api.routes.admin import EngineRoutes
from penstock.api.routes.count_tokens import CountTokensRoutes
from penstock.api.routes.metrics_endpoint import MetricsEndpoint, MetricSources
from penstock.api.routes.models import ModelRoutes
from penstock.api.routes.operations import OperationRoutes
from penstock.api.routes.responses import ResponseRoutes
from penstock.api.routes.tokenize import TokenizeRoutes
from penstock.api.routes.tokenizer_info import tokenizer_info
from penstock.api.routes.weight_transfer import WeightTransferRoutes
from penstock.api.routes.weights import WeightRoutes
from penstock.api.throughput_log import ThroughputLog
from penstock.config.errors import ConfigError
from penstock.dialects.registry import make_dialects, make_token_counters
from penstock.dispatch.adapter_changes import AdapterChanges
from penstock.dispatch.coordinator_client import CoordinatorClient
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.periodic_timer import PeriodicTimer
from penstock.dispatch.state_changes import StateChanges
from penstock.dispatch.weight_changes import WeightChanges
from penstock.dispatch.weight_receiver import WeightReceiver
from penstock.engine.pooling.description import PoolingDescription, describe_pooling
from penstock.generation.input_processor import InputProcessor
from penstock.generation.media.preparation import PicturePreparation
from penstock.generation.model_info import ModelInfo, SamplingDefaults, model_type, sampling_defaults
from penstock.generation.pooling.input_encoder import InputEncoder
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.reply import PooledReply
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.prompt_encoder import PromptEncoder, segment_marker
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.generation.replies.keep_alive import KeepAlive
from penstock.generation.replies.reply import RequestContext, RequestReply, TextTables
from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.server import HttpServer
from penstock.http.server_state import Limits
from penstock.http.sockets.connection_source import ConnectionSource, HandedOverConnections, ListeningSocket
from penstock.http.tls import server_context, watch_files, watched_certificate
from penstock.media.client import MediaClient
from penstock.media.store import MediaStore
from penstock.metrics.api_server_metrics import ApiServerMetrics
from penstock.metrics.board_file import BoardFile
from penstock.metrics.ended_requests import RequestFigures, RequestKind
from penstock.metrics.freed_memory import keep_freed_memory
from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.media_metrics import MediaMetrics
from penstock.metrics.memory import Trimmer
from penstock.metrics.snapshot import Snapshot, decode_snapshot, encode_snapshot
from penstock.metrics.store_metrics import StoreMetrics
from penstock.store.response_store import ResponseStore, open_store
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.rows.io_submit import make_burst_writer
from penstock.streaming.token_log import TokenLog
from penstock.telemetry.exports import Exports
from penstock.telemetry.trace_context import TracePropagator
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import (
    HEARTBEAT_INTERVAL_S,
    AcceptConnections,
    AnnounceDrain,
    ApiKeys,
    ChildReport,
    DesiredStates,
    Drain,
    EnableThroughputLog,
    EnginesDraining,
    Launch,
    Stop,
    SupervisorMetrics,
)
from penstock.wire.coordination import BUILD
from penstock.wire.handover import HandoverReceiver
from penstock.wire.messages import ENGINE_PROTOCOL_VERSION, EngineInfo, Hello
from penstock.wire.sockets import engine_address

log = logging.getLogger(__name__)

HOUSEKEEPING_INTERVAL_S = 0.25
"""Seconds between checks whether to collect garbage, and between samples of the event loop's lag."""
SWITCH_INTERVAL_S = 0.0005
"""Time that a thread runs Python code while another one wants to. With Python's 5 ms, every system call of
the event loop would wait that long while a thread checks a large request."""
OWN_ENGINES_WAIT_S = 1.0
"""Longest wait for connections to this host's engines before clients are served. All of them have started by
then; one that has died since comes later."""
HELD_BODIES = 4
"""Request bodies of the maximum size that an API server may hold altogether until they are tokenized, beside
:data:`HELD_BYTES`. Beyond them, the largest incomplete request gets 503."""
KEPT_BYTES = 64 << 20
"""Freed memory that is kept for the bodies, texts and token ids of the next requests."""
HELD_BYTES = 64 << 20
"""Bytes for small bodies and heads of requests."""


def run(control: ControlChannel) -> int:
    """The process's main function: serves until it is stopped. Returns the exit code."""
    keep_freed_memory(KEPT_BYTES)
    code: int = uvloop.run(_Server(control).serve())
    return code


@contextlib.contextmanager
def _model_files() -> Iterator[None]:
    """A file of the model that cannot be used is the operator's to repair: its error names it in one line."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _ended(reply: RequestReply | PooledReply, took_s: float) -> RequestFigures:
    usage, first = reply.usage(), reply.first_token_at
    return RequestFigures(
        took_s,
        None if first is None else first - reply.arrival,
        usage.prompt_tokens,
        usage.completion_tokens,
        max((choice.generated for choice in reply.choices), default=0),
    )


class _Server:
    """Builds the parts, in the order in which what they need becomes known."""

    def __init__(self, control: ControlChannel) -> None:
        # -- per process
        self._control = control
        self._launch: Launch = control.launch
        self._config = self._launch.config
        self._metrics = ApiServerMetrics()
        self._collector = GarbageCollector(self._config.gc_policy)
        self._trimmer = Trimmer()
        self._first_engine: asyncio.Future[EngineInfo]
        self._engine_client: EngineClient
        self._state_changes: StateChanges
        self._generation: GenerationRoutes
        self._input_processor: InputProcessor | None = None
        self._app: App
        self._http: HttpServer
        self._windows = FlowWindows()
        self._metrics_endpoint: MetricsEndpoint
        self._coordinator_client: CoordinatorClient | None = None
        self._exports = Exports(
            self._config,
            describe,
            self._metrics.ended.points,
            scope="penstock.api",
            instance=self._launch.instance,
            uds=self._config.uds,
        )
        self._background: BackgroundResponses | None = None
        self._board_file = BoardFile(self._launch.run_dir, self._launch.incarnation)
        self._accepting: asyncio.Future[None]
        self._ended: asyncio.Future[None]
        self._own_engines_up = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._throughput_task: asyncio.Task[None] | None = None
        self._logs_throughput = False
        """Whether this API server writes the throughput line for all of them."""

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._first_engine = loop.create_future()
        self._accepting = loop.create_future()
        self._ended = loop.create_future()
        launch = self._launch
        self._control.progress("loading tokenizer")
        with _model_files():
            tokenizer = Tokenizer.load(launch.tokenizer_dir)
            template = ChatTemplate.load(launch.tokenizer_dir, self._config.chat_template)
        places = {rank: engine_address(launch.run_dir, rank) for rank in launch.local_ranks}
        self._engine_client = EngineClient(
            launch.engine_count,
            places,
            Hello(
                ENGINE_PROTOCOL_VERSION,
                launch.index,
                launch.epoch,
                launch.incarnation,
                build=launch.traits.get(BUILD, ""),
            ),
            self._on_engine_up,
            key=launch.key,
            lockstep=self._config.enable_expert_parallel,
            servers=launch.api_server_count,
        )
        self._state_changes = StateChanges(self._engine_client, self._report, self._check_own_engines)
        if launch.desired is not None:
            self._state_changes.on_desired_states(launch.desired)
            self._engine_client.adapters.assume_observed()
        loop.add_reader(self._control.fileno(), self._on_command)
        self._engine_client.connect()
        with contextlib.ExitStack() as ends:
            self._send_heartbeat()
            heartbeats = PeriodicTimer("heartbeats", HEARTBEAT_INTERVAL_S, self._send_heartbeat)
            ends.callback(heartbeats.cancel)
            if launch.coordinator is not None:
                self._coordinator_client = CoordinatorClient(launch, self._engine_client)
                ends.callback(self._coordinator_client.close)
            return await self._serve(tokenizer, template)

    async def _serve(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> int:
        await self._engine_or_end()
        if self._ended.done():
            self._engine_client.close("The server was stopped.")
            return 0
        info = self._first_engine.result()
        media = await self._connect_media(info, tokenizer)
        self._app = self._build(info, tokenizer, template, media)
        await self._listen(self._app)
        self._engine_client.close("The server was stopped.")
        if media is not None:
            await media.close()
        if self._background is not None:
            await self._background.close()
        self._exports.finish()
        self._exports.close()
        return 0

    async def _connect_media(self, info: EngineInfo, tokenizer: Tokenizer) -> PicturePreparation | None:
        """Wait for a media worker; None: the engine takes no pictures."""
        launch = self._launch
        if info.media is None or launch.media_dir is None or not launch.media_workers:
            return None
        self._metrics.media = MediaMetrics()
        store = MediaStore(launch.media_dir, launch.media_capacity)
        client = MediaClient(launch.run_dir, launch.media_workers, store, self._metrics.media)
        self._engine_client.pages.lease_of = client.lease_of
        self._control.progress("waiting for a media worker")
        with _model_files():
            return PicturePreparation(client, await client.start(), tokenizer)

    async def _engine_or_end(self) -> None:
        """Wait for an engine or for Stop. The supervisor limits the startup time of this host's engines;
        engines of other hosts may connect at any time."""
        either = self._first_engine, self._ended
        if not self._first_engine.done():
            self._control.progress("waiting for an engine")
        patience_s = self._config.startup_timeout / 2
        while not (await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=patience_s))[0]:
            self._control.progress("waiting for an engine")

    def _on_engine_up(self, info: EngineInfo) -> None:
        if self._input_processor is not None:
            self._input_processor.limit_total(info.kv_cache_tokens)
        if not self._first_engine.done():
            self._first_engine.set_result(info)

    def _check_own_engines(self) -> None:
        """Note whether all engines of this host are connected and have observed the desired states."""
        ranks = self._launch.own_ranks
        if all(engine.up_to_date for engine in self._engine_client.engines if engine.rank in ranks):
            self._own_engines_up.set()
        else:
            self._own_engines_up.clear()

    # -- once the engine is known

    def _model_info(self, info: EngineInfo, media: PicturePreparation | None) -> ModelInfo:
        launch = self._launch
        with _model_files():
            auto = self._config.generation_config == "auto"
            defaults = sampling_defaults(launch.model_dir) if auto else SamplingDefaults()
        return ModelInfo(
            names=tuple(launch.served_model_names),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            defaults=defaults,
            model_type=model_type(launch.model_dir),
            media=None if media is None else media.description,
            picture_tokens=int if media is None else media.typical_tokens,
            transfers_kv=info.transfers_kv,
            tasks=() if info.pooling is None else info.pooling.names,
        )

    def _build(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        media: PicturePreparation | None,
    ) -> App:
        launch = self._launch
        model_info = self._model_info(info, media)
        adapters = self._engine_client.adapters
        input_processor = InputProcessor(self._config, model_info, tokenizer, template, adapters)
        for known in filter(None, (engine.info for engine in self._engine_client.engines)):
            input_processor.limit_total(known.kv_cache_tokens)
        self._input_processor = input_processor
        metrics = self._metrics
        log = TokenLog() if self._config.resume_timeout > 0 else None
        tables = TextTables.make(tokenizer.raw, info.vocab_size, input_processor.max_logprobs)
        streams = OutputProcessor(
            tables.plain,
            RowMetrics(metrics.ttft, metrics.itl, metrics.event_tokens),
            log=log,
            burst=make_burst_writer(),
            windows=self._windows,
            later=asyncio.get_running_loop().call_soon,
            guarded=tables.guarded(input_processor.output_format.guard),
        )
        self._engine_client.open(streams, self._config.resume_timeout, metrics.interrupted)
        context = RequestContext(
            engine_client=self._engine_client,
            streams=streams,
            tables=tables,
            on_end=self._on_reply_end,
            max_backlog=self._config.max_stream_backlog,
        )
        large = ByteBudget(THREADS_BYTES)
        store = self._open_store()
        encoder = PromptEncoder(tokenizer, segment_marker(tokenizer, template))
        self._generation = GenerationRoutes(self._config, encoder, context, large, self._background, media)
        self._metrics_endpoint = MetricsEndpoint(
            launch,
            MetricSources(
                metrics,
                self._engine_client,
                streams,
                input_processor,
                self._collector,
                self._clients,
                self._generation.planner.turns,
                self._exports.span_counts,
            ),
            template=template,
            refresh=self._refresh_metrics,
            share=self._share_metrics,
        )
        if self._coordinator_client is not None:
            self._coordinator_client.start_reporting(self._metrics_endpoint.snapshot)
        return App(
            config=self._config,
            models=ModelRoutes(input_processor, launch.model_dir),
            dialects=make_dialects(self._config, input_processor, store, launch.seal_key),
            pool=self._pooling_routes(info, input_processor, context),
            token_counters=make_token_counters(self._config, input_processor, store, launch.seal_key),
            count_tokens=CountTokensRoutes(self._config, encoder, info.max_model_len, large, media),
            tokenize=TokenizeRoutes(input_processor, encoder, self._config, large, media),
            tokenizer_info=self._tokenizer_info(template),
            generation=self._generation,
            engine_client=self._engine_client,
            streams=streams,
            metrics=metrics,
            metrics_endpoint=self._metrics_endpoint,
            collector=self._collector,
            process_name=f"api-server {launch.index}",
            responses=ResponseRoutes(store, self._config.sse_keep_alive),
            engines=EngineRoutes(self._engine_client, self._control.drain_engine),
            adapters=AdapterRoutes(
                self._config,
                self._engine_client,
                AdapterChanges(self._engine_client, self._state_changes),
                input_processor,
            ),
            operations=OperationRoutes(self._config, self._engine_client, self._state_changes),
            weights=self._weight_routes(),
            tracing=self._tracing(),
            spans=self._exports.spans,
        )

    def _tokenizer_info(self, template: ChatTemplate | None) -> bytes | None:
        if not self._config.enable_tokenizer_info_endpoint:
            return None
        return tokenizer_info(Path(self._launch.tokenizer_dir), template)

    def _open_store(self) -> ResponseStore | None:
        if self._launch.response_store_dir is None:
            return None
        self._metrics.store = counts = StoreMetrics()
        store = open_store(Path(self._launch.response_store_dir), self._config, counts)
        self._background = BackgroundResponses(store, counts)
        return store

    def _pooling_routes(
        self, info: EngineInfo, inputs: InputProcessor, context: RequestContext
    ) -> PoolingRoutes:
        described = self._described(info)
        processor = PoolingProcessor(self._config, inputs, info.pooling, described)
        encoder = InputEncoder(inputs.tokenizer, processor.max_tokens, processor.pools_prompt)
        return PoolingRoutes(self._config, self._generation, context, processor, encoder)

    def _described(self, info: EngineInfo) -> PoolingDescription | None:
        """What the model's files say of vectors. Raises ConfigError, but not for a model of vLLM's engines:
        these may run one of which the files say too little to anybody else."""
        directory, runner = Path(self._launch.model_dir), self._config.runner
        if self._config.engine != "vllm":
            return describe_pooling(directory, runner)
        with contextlib.suppress(ConfigError):
            return None if info.pooling is None else describe_pooling(directory, "pooling")
        return None

    def _tracing(self) -> TracePropagator | None:
        if self._exports.spans is None:
            return None
        return TracePropagator(spans=True, ratio=self._config.otlp_sampling_ratio)

    def _weight_routes(self) -> WeightRoutes:
        client, launch = self._engine_client, self._launch
        changes = WeightChanges(self._state_changes, client.states, lockstep=client.lockstep)
        receiver = WeightReceiver(launch.run_dir)
        weights_dir = launch.weights_dir or launch.run_dir
        transfers = WeightTransferRoutes(
            client, changes, receiver, weights_dir, launch.model_dir, lambda: self._generation.draining
        )
        return WeightRoutes(client, changes, transfers)

    async def _listen(self, app: App) -> None:
        config = self._config
        limits = Limits(
            header_timeout_s=config.header_timeout,
            keep_alive_timeout_s=config.keep_alive_timeout,
            max_connections=config.max_connections,
            max_header_bytes=config.max_header_bytes,
            max_backlog=config.max_stream_backlog,
            max_held_bytes=HELD_BODIES * config.max_request_bytes + HELD_BYTES,
        )
        tls = server_context(config)
        self._http = HttpServer(
            app,
            self._connection_source(),
            limits,
            tls=tls,
            on_refusal=app.refused,
            windows=self._windows,
        )
        helpers = [asyncio.ensure_future(each) for each in self._exports.running()]
        if config.log_interval:
            self._throughput_task = asyncio.ensure_future(self._log_throughput())
            helpers.append(self._throughput_task)
        if (certificate := watched_certificate(tls, config)) is not None:
            helpers.append(asyncio.ensure_future(watch_files(certificate)))
        self._collector.start()
        assert self._engine_client.streams is not None
        with contextlib.ExitStack() as ends:
            for helper in helpers:
                ends.callback(helper.cancel)
            housekeeping = PeriodicTimer(
                "housekeeping", HOUSEKEEPING_INTERVAL_S, lambda: self._keep_house(housekeeping.lag_s)
            )
            ends.callback(housekeeping.cancel)
            if config.sse_keep_alive:
                ends.callback(KeepAlive(self._engine_client.streams, config.sse_keep_alive).cancel)
            ends.callback(self._generation.close)
            self._control.ready()
            if await self._accepts_or_ends():
                await self._http.run_to_the_end()

    async def _accepts_or_ends(self) -> bool:
        """Wait until the supervisor leaves clients to this process, and until this host's engines are
        connected and have told what adapters they have: an engine of another host would get all requests
        meanwhile. False: it was stopped."""
        await asyncio.wait((self._accepting, self._ended), return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._ended.done() else OWN_ENGINES_WAIT_S):
                await self._own_engines_up.wait()
        return not self._ended.done()

    def _connection_source(self) -> ConnectionSource:
        launch = self._launch
        if launch.handover_fd is not None:
            return HandedOverConnections(HandoverReceiver(launch.handover_fd), self._on_full)
        assert launch.listen_fd is not None
        listener = socket.socket(fileno=launch.listen_fd)
        return ListeningSocket(listener, self._config.max_connections, self._on_full)

    def _on_full(self) -> None:
        self._metrics.accept_pauses += 1

    # -- while it runs

    def _report(self, report: ChildReport) -> None:
        """Send a report about states to the supervisor. A long one has no room in the socket of some systems
        (8 KiB on macOS), and the next heartbeat, which would go on with it, comes only after a second."""
        self._control.forward(report)
        if self._control.unsent:
            asyncio.get_running_loop().add_writer(self._control.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        with contextlib.suppress(SupervisorGone):  # the reader of commands ends the process
            self._control.flush()
            if self._control.unsent:
                return
        asyncio.get_running_loop().remove_writer(self._control.fileno())

    def _send_heartbeat(self) -> None:
        """Tell the supervisor that this loop runs; reports that found no room go with the next."""
        with contextlib.suppress(SupervisorGone):  # the reader of commands ends the process
            self._control.heartbeat()

    def _clients(self) -> tuple[int, int]:
        """Number of open connections, and reply bytes that wait for them."""
        return self._http.connection_count, self._http.bytes_queued

    def _keep_house(self, lag_s: float) -> None:
        """Collect garbage and return freed memory to the system while no stream is open. ``lag_s``: how late
        the loop runs this."""
        self._metrics.loop_lag.add(lag_s)
        self._trimmer.watch(self._http.connection_count, idle=not self._engine_client.streams)
        if self._engine_client.streams:
            self._collector.on_busy()
        else:
            self._collector.on_idle()

    async def _log_throughput(self) -> None:
        """Run until this API server ends or is replaced."""
        throughput_log = ThroughputLog(self._metrics_endpoint.totals, lambda: self._logs_throughput)
        while True:
            await asyncio.sleep(self._config.log_interval)
            await self._engine_client.refresh_metrics()
            throughput_log.write(time.monotonic())

    def _on_reply_end(self, reply: RequestReply | PooledReply, outcome: str) -> None:
        if outcome == "refused":  # counted with those that are refused before they have a reply
            return
        metrics = self._metrics
        took_s = time.monotonic() - reply.arrival
        kind = RequestKind(reply.format.api, outcome, reply.plan.model)
        metrics.ended.add(kind, took_s)
        if self._exports.metrics is not None:
            metrics.ended.add_exported(kind, _ended(reply, took_s))
        if isinstance(reply, PooledReply):
            return
        requests = metrics.requests_by_engine(reply.first_rank)
        n, choices = reply.plan.n, reply.choices
        if len(choices) == 1:
            requests.add(1, choices[0].generated)
            return
        generated = [choice.generated for choice in choices]
        for first in range(0, len(generated), n):  # of each prompt
            requests.add(n, max(generated[first : first + n]))

    async def _refresh_metrics(self, own: Snapshot) -> None:
        """See :class:`MetricsEndpoint`. The API servers first: when one has answered, what it has sent to
        engines comes before the query."""
        if self._coordinator_client is not None:
            await self._coordinator_client.refresh_metrics(own)
        await self._engine_client.refresh_metrics()

    async def _share_metrics(self, own: Snapshot) -> None:
        """See :class:`MetricsEndpoint`. Without a coordinator they are kept for a successor."""
        if self._coordinator_client is not None:
            await self._coordinator_client.share_metrics(own)
            return
        board = self._engine_client.board
        self._board_file.load(board)
        board.add_or_log(own, encode_snapshot(own))
        self._board_file.save(board)

    def _on_command(self) -> None:
        try:
            commands = self._control.receive()
        except SupervisorGone:
            log.error("the supervisor is gone: ending")
            raise SystemExit(1) from None
        for command in commands:
            match command:
                case AcceptConnections():
                    if not self._accepting.done():
                        self._accepting.set_result(None)
                case AnnounceDrain():
                    self._app.leaving = True
                case Drain():
                    self._drain(command)
                case Stop():
                    self._stop()
                case EnginesDraining():
                    self._engine_client.set_draining(command.ranks)
                case SupervisorMetrics():
                    self._engine_client.board.add_or_log(decode_snapshot(command.snapshot), command.snapshot)
                case DesiredStates():
                    self._state_changes.on_desired_states(command)
                case ApiKeys():
                    self._app.set_keys(command.api_key, command.admin_api_key)
                case EnableThroughputLog():
                    self._logs_throughput = True

    def _drain(self, command: Drain) -> None:
        if not self._first_engine.done():
            self._stop()
        elif command.replaced:
            self._http.retire(lambda: self._generation.idle)
            if self._throughput_task is not None:
                self._throughput_task.cancel()
        else:
            self._draining = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        """Serve running requests to their end. Connections are accepted meanwhile, so that new requests are
        refused with a reply."""
        self._http.end_connections()
        await self._generation.drain()
        self._http.drain()

    def _stop(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        if self._first_engine.done():
            self._generation.draining = True
            self._engine_client.close("The server was stopped.")
            self._http.stop()
