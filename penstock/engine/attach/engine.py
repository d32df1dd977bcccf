"""An attached engine: a headless engine process of ``vllm serve``, behind Penstock's Engine interface.

The process that runs this lives as long as one attachment. When the engine is lost, or a connection to it
breaks, :class:`.connection.EngineLost` ends it: its API servers resume the streams on other engines, and
the supervisor starts a successor, which starts an engine of its own (:mod:`.launch`), or waits for one of its
rank (``--attach``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.lora_modules import lora_settings
from penstock.config.serve import ServeConfig
from penstock.engine.attach.adapter_copies import AdapterCopies
from penstock.engine.attach.adapter_loader import AttachedAdapterLoader, request_of
from penstock.engine.attach.attached_process import AttachedProcess
from penstock.engine.attach.base_shapes import BaseShapes
from penstock.engine.attach.output_decoder import DecodedOutputs
from penstock.engine.attach.pictures import AttachedPictures, media_info
from penstock.engine.attach.pooling.streams import PooledStreams
from penstock.engine.attach.requests import encode_add
from penstock.engine.attach.step_output import VllmCounters
from penstock.engine.attach.streams import AttachedStreams
from penstock.engine.attach.weight_loader import (
    CACHE_IN_USE,
    SENT_ONCE,
    AttachedWeightLoader,
    ExpectedTransfer,
    start_of,
)
from penstock.engine.base import Hold, Load, RequestRejected, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter
from penstock.engine.vocabulary import read_eos_token_ids, read_vocab_size
from penstock.engine.weights.weight_loader import WeightLoader
from penstock.media.store import MediaStore
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.messages import EngineInfo, LoraInfo, Submit
from penstock.wire.sockets import Wakeup
from penstock.wire.vllm.messages import EngineCoreOutput, EngineLost, ReadyResponse
from penstock.wire.vllm.model_kind import has_experts

log = logging.getLogger(__name__)

ABORTED_PER_STEP = 1024
"""Requests of an earlier attachment that one message aborts."""
DROPS_WEIGHTS = 2
"""The sleep level at which vLLM drops the model's weights."""
STEPS_TOGETHER = (
    "vLLM's engines that step together, of a mixture of experts with several ranks, cannot keep streams "
    "without computing them: abort or wait"
)


class ModelFacts:
    """What the model's files tell."""

    def __init__(self, model_dir: str) -> None:
        """Raise ConfigError."""
        self.directory = model_dir
        self.vocab_size = read_vocab_size(Path(model_dir))
        self.eos_token_ids = read_eos_token_ids(Path(model_dir))


class AttachedEngine:
    """Streams wait in Penstock's queue for a slot; requests with a slot are in vLLM, which schedules them."""

    pages = None

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model: ModelFacts,
        attached: AttachedProcess,
        *,
        run_dir: str,
        rank: int,
        given: Sequence[str] = (),
        store: MediaStore | None = None,
    ) -> None:
        """``run_dir``: where copies of adapters and links to weights are kept. ``given``: fields of
        ``config`` that the operator has set. ``store``: of the host's pictures; None: it takes none."""
        ready = attached.ready
        self._end_process = attached.end
        self._profile_dir = config.profile_dir if config.attach is None else None
        self._core = core = attached.core
        self._ids = core.ids
        self.info = _info(config, model, attached, takes_pictures=store is not None)
        self._pictures: AttachedPictures | None = None
        if store is not None and self.info.media is not None:
            self._pictures = AttachedPictures(store, config.engine_args or ())
        self._loader: AttachedAdapterLoader | None = None
        self.adapters: AdapterTable | None = None
        if self.info.lora is not None:
            copies = AdapterCopies(run_dir, rank)
            self._loader = AttachedAdapterLoader(core, self.info.lora, copies, BaseShapes(model.directory))
            self.adapters = AdapterTable(self._loader, self.info.lora.max_cpu_loras)
        self._steps_together = ready.data_parallel_size > 1 and has_experts(Path(model.directory))
        start, links_dir = start_of(config, model.directory), f"{run_dir}/weights-{rank}"
        self._weights = AttachedWeightLoader(core, model.directory, start, links_dir, self._restore_adapters)
        self._hold = Hold.NOTHING
        self.wakeups: Sequence[Wakeup] = attached.connection.wakeups
        self.can_sleep = ready.enable_sleep_mode
        self._eos = self.info.eos_token_ids
        kind = AttachedStreams if self.info.pooling is None else PooledStreams
        self._streams: AttachedStreams | PooledStreams = kind(
            config, self.info, self._ids.slots, self.adapters
        )
        self._counts = VllmCounters()
        self._speculates = any("speculative" in argument for argument in config.engine_args or ())
        self._silence_s = config.engine_hang_timeout
        self._lost: EngineLost | None = None
        """Why the engine is lost, as was found outside of a step."""
        self._lost_weights = False
        """Whether vLLM has dropped the model's weights."""
        if self._pictures is not None and core.takes_hints:
            core.send(self._pictures.question())
        _warn_of_differences(config, given, ready, rank)
        log.info("engine %d is vLLM %s, attached", rank, ready.vllm_version)

    @property
    def weights(self) -> WeightLoader | None:
        return None if self._steps_together else self._weights

    def close(self) -> None:
        self._weights.close()
        self._core.abort(self._running_ids())
        self._core.close()
        self._end_process()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        sampling = request.sampling
        if request.media and self._pictures is None:
            raise RequestRejected("media: this engine of vLLM's takes no pictures")
        if self._speculates and (sampling.min_p or sampling.logit_bias):
            field = "min_p" if sampling.min_p else "logit_bias"
            raise RequestRejected(f"{field}: vLLM does not support it with speculative decoding, which is on")
        slot = self._streams.begin_at_once(server, request) if self._hold is Hold.NOTHING else None
        if slot is None:
            self._streams.submit(server, request)
            return
        try:
            self._send(slot, request, self._streams.table.adapters.get(slot))
        except RequestRejected:
            self._release([slot])
            raise

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self._streams.abort(server, streams)

    def drop_server(self, server: int) -> None:
        slots = self._streams.drop_server(server)
        self._core.abort([self._ids.of(slot) for slot in slots])
        self._release(slots)

    def fail_all(self, code: str, message: str) -> StepRows:
        self._core.abort(self._running_ids())
        for slot in self._streams.table.running_slots():
            self._forget(slot)
        return self._streams.fail_all(code, message)

    def _running_ids(self) -> list[str]:
        return [self._ids.of(slot) for slot in self._streams.table.running_slots()]

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots, whose requests vLLM runs no longer."""
        for slot in slots:
            self._forget(slot)
        self._streams.release(slots)

    def _forget(self, slot: int) -> None:
        self._ids.forget(slot)
        if self._pictures is not None:
            self._pictures.forget(slot)

    def _admit(self) -> None:
        """Give vLLM as many waiting requests as there are free slots."""
        while (admitted := self._streams.begin_next(self._hold)) is not None:
            slot, first = admitted
            try:
                self._send(slot, first.request, first.adapter)
            except RequestRejected as error:
                self._release([slot])
                self._streams.queue.fail(first, error.code, str(error))

    def _send(
        self, slot: int, request: Submit, adapter: LoadedAdapter | None, *, again: bool = False
    ) -> None:
        """Give vLLM the request of a slot. ``again``: it lacked values of its pictures. Raises
        RequestRejected."""
        if self._streams.table.running() == 1:
            self._core.heard_at = time.monotonic()  # silence counts from now on
        request_id = self._ids.of(slot) if again else self._ids.assign(slot)
        lora, features = request_of(adapter), None
        if self._pictures is not None:
            features = self._pictures.features(slot, request, lora and lora[0], whole=again)
        self._core.send(
            encode_add(
                request_id,
                request,
                self._eos,
                self.info.vocab_size,
                lora,
                features,
                hints=request.hints is not None and self._core.takes_hints,
                type_ranges=self._core.takes_type_ranges,
            )
        )

    # -- the step

    def has_work(self) -> bool:
        streams = self._streams
        return bool(
            streams.aborted or streams.queue or streams.queue.has_finished() or streams.table.running()
        )

    def can_step(self) -> bool:
        """Whether there is output, a stream to begin or to end, or the engine is silent or lost. Sends what
        has been submitted since."""
        streams = self._streams
        try:
            self._core.flush()
        except EngineLost as error:
            self._lost = error
        return bool(
            self._lost is not None
            or self._core.has_output
            or streams.aborted
            or streams.queue.has_finished()
            or streams.can_begin(self._hold)
            or self._is_silent()
        )

    def _is_silent(self) -> bool:
        """Whether vLLM has requests, and has sent nothing for too long."""
        return (
            self._silence_s > 0
            and self._hold is not Hold.ALL
            and self._streams.table.running() > 0
            and time.monotonic() > self._core.heard_at + self._silence_s
        )

    def hold(self, hold: Hold) -> None:
        """With ALL vLLM's scheduler is paused. What it has computed by then is stepped still. Raises
        EngineLost, too."""
        if hold is not Hold.NOTHING and self._steps_together:
            raise ValueError(STEPS_TOGETHER)
        if (hold is Hold.ALL) != (self._hold is Hold.ALL):
            if hold is Hold.ALL:
                self._core.call("pause_scheduler", "keep", False)
            else:
                self._core.call("resume_scheduler")
        self._hold = hold

    def flush(self) -> StepRows:
        return self._streams.flush()

    def step(self) -> StepRows:
        """Admit waiting streams, settle the next outputs of vLLM's. Raises EngineLost."""
        if self._lost is not None:
            raise self._lost
        parts = [self._take_aborted()] if self._streams.aborted else []
        self._admit()
        if self._streams.queue.has_finished():
            parts.append(self._streams.queue.take_finished())
        received = self._core.receive()
        if received is not None:
            parts += self._settle(*received)
        elif self._is_silent():
            raise EngineLost(f"it has requests, and has sent nothing for {self._silence_s:g} s")
        self._core.flush()
        return concat_rows(parts)

    def dummy_step(self) -> None:
        """vLLM's engines step along by themselves."""

    def _take_aborted(self) -> StepRows:
        """The ends of aborted streams, with their held tokens; frees their slots."""
        slots, rows = self._streams.take_aborted()
        self._core.abort([self._ids.of(slot) for slot in slots])
        self._release(slots)
        return rows

    def _settle(self, decoded: DecodedOutputs, frames: list[memoryview]) -> list[StepRows]:
        """Make the rows that are due of vLLM's output, and free slots of ended requests. Raises
        EngineLost."""
        stats = decoded.rest.scheduler_stats
        if stats is not None:
            self._counts.add(stats)
            self._speculates = self._speculates or stats.spec_decoding_stats is not None
        if decoded.foreign:
            self._core.abort(decoded.foreign[:ABORTED_PER_STEP])
        again = [rows for output in decoded.missing if (rows := self._send_again(output)) is not None]
        if not len(decoded.slots):
            return again
        parts, ended = self._streams.settle(decoded, frames, self._counts)
        self._release(ended)
        return [*again, *parts]

    def _send_again(self, output: EngineCoreOutput) -> StepRows | None:
        """Send a request with all values of its pictures, as vLLM lacks some. Returns the stream's end, if
        they are gone."""
        pictures, streams = self._pictures, self._streams
        if pictures is None or not isinstance(streams, AttachedStreams):
            return None
        slot = self._ids.slot_of(output.request_id)
        pictures.missing(output.request_id, output.mm_cache_miss_hashes)
        request = None if slot is None else pictures.request(slot)
        if slot is None or request is None:
            return None
        try:
            self._send(slot, request, streams.table.adapters.get(slot), again=True)
        except RequestRejected as error:
            self._forget(slot)
            return streams.fail(slot, error.code, str(error))
        return None

    # -- reporting

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return self._streams.table.take_admitted()

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return self._streams.table.take_preempted()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        """vLLM publishes them itself."""
        return ()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._streams.table.notify_start = notify

    def load(self) -> Load:
        streams = self._streams
        running = streams.table.running()
        waiting = min(running, self._counts.waiting) if self._hold is Hold.NOTHING else 0
        return Load(
            waiting=len(streams.queue) + waiting,
            running=running - waiting,
            kv_used=_fraction(self._counts.kv_usage),
            generated=streams.table.generated,
        )

    def metrics(self) -> dict[str, float]:
        of_pictures = {} if self._pictures is None else self._pictures.metrics()
        return self._counts.metrics() | of_pictures

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        core = self._core
        if method in ("sleep", "wake_up") and not self.can_sleep:
            raise ValueError("vLLM's engine sleeps only when it is started with --enable-sleep-mode")
        match method:
            case "reset_prefix_cache":
                if not core.call("reset_prefix_cache"):
                    raise ValueError(CACHE_IN_USE)
            case "init_weight_transfer_engine":
                core.call("collective_rpc", method, None, (), arguments)
            case "expect_weights":
                if self._steps_together:
                    raise ValueError("this engine cannot replace its weights while it runs")
                self._weights.expect(msgspec.convert(arguments, ExpectedTransfer))
            case "sleep":
                if arguments["level"] >= DROPS_WEIGHTS and self._weights.is_sent:
                    raise ValueError(f"{SENT_ONCE}; level 1 keeps them")
                core.call("reset_prefix_cache")
                core.call("sleep", arguments["level"])
                core.is_asleep = True
                self._lost_weights = arguments["level"] >= DROPS_WEIGHTS
            case "wake_up":
                core.call("wake_up")
                if self._lost_weights:
                    core.call("collective_rpc", "reload_weights")
                core.is_asleep = False
                if self._lost_weights:
                    self._restore_adapters()
                self._lost_weights = False
            case "start_profile":
                core.call("profile", True)
            case "stop_profile":
                core.call("profile", False)
                return self._profile_dir or "the directory of the engine's own --profiler-config"
            case _:
                raise ValueError(f"vLLM's engine has no operation {method!r}")

    def _restore_adapters(self) -> None:
        """Load all adapters again. Raises AdapterError."""
        if self._loader is not None:
            self._loader.restore()


def _fraction(number: float) -> float:
    """``number`` within 0 and 1; 0 for what is none."""
    return min(number, 1.0) if number > 0 else 0.0


def _info(
    config: ServeConfig, model: ModelFacts, attached: AttachedProcess, *, takes_pictures: bool
) -> EngineInfo:
    """Return the engine's facts: what it tells, what the model's files tell, and the options."""
    lora, ready = lora_settings(config), attached.ready
    blocks = {"block_size": ready.block_size, "num_gpu_blocks": ready.num_gpu_blocks}
    transfers = any(argument.startswith("--kv-transfer-config") for argument in lora.engine_args)
    return EngineInfo(
        engine="vllm",
        max_model_len=ready.max_model_len,
        vocab_size=model.vocab_size,
        max_num_seqs=ready.max_num_seqs,
        eos_token_ids=model.eos_token_ids,
        device=f"that of vLLM {ready.vllm_version}",
        dtype=ready.dtype,
        kv_cache_tokens=ready.kv_cache_size_tokens or ready.num_gpu_blocks * (ready.block_size or 0),
        cache_config={name: str(value) for name, value in blocks.items() if value is not None},
        transfers_kv=transfers,
        lora=LoraInfo(ready.max_loras or lora.max_loras, lora.max_lora_rank, lora.max_cpu_loras)
        if lora.enabled
        else None,
        pooling=attached.pooling,
        media=media_info(model.directory) if takes_pictures and attached.pooling is None else None,
    )


def _warn_of_differences(config: ServeConfig, given: Sequence[str], ready: ReadyResponse, rank: int) -> None:
    """Log what the operator has set here and the engine has otherwise: its own values hold."""
    for field in ("max_model_len", "max_num_seqs", "block_size", "dtype"):
        wanted, found = getattr(config, field), getattr(ready, field)
        if field in given and wanted not in (None, "auto", found):
            flag = field.replace("_", "-")
            log.warning(
                "engine %d was started with --%s %s, not %s: its own holds", rank, flag, found, wanted
            )
