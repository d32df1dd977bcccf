"""The vllm engine: vLLM's scheduler, KV cache, kernels and executors, behind Penstock's Engine interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.base import Load, RequestRejected, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.engine.torch.profiler import TorchProfiler
from penstock.engine.vllm.adapter_copies import AdapterCopies
from penstock.engine.vllm.adapter_loader import VllmAdapterLoader, request_of
from penstock.engine.vllm.arguments import arguments
from penstock.engine.vllm.base_shapes import BaseShapes
from penstock.engine.vllm.internals import VllmCore
from penstock.engine.vllm.startup_progress import startup_progress
from penstock.engine.vllm.step_output import VllmStepOutput
from penstock.engine.vllm.streams import EngineOfStreams, Slots, VllmStreams
from penstock.wire.messages import Submit
from penstock.wire.sockets import ProcessGroupSpec, Wakeup

STALLED_WAIT_S = 0.001
"""Seconds that a step without output waits while requests wait for a transfer or a grammar; as in vLLM."""


class VllmEngine(EngineOfStreams):
    """Streams wait in Penstock's queue for a slot; requests with a slot are in vLLM, which schedules them."""

    wakeups: Sequence[Wakeup] = ()

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model_dir: str,
        progress: Callable[[str, float | None], None],
        *,
        run_dir: str,
        rank: int = 0,
        given: Sequence[str] = (),
        group: ProcessGroupSpec | None = None,
    ) -> None:
        """Loads the model. ``run_dir``: where copies of adapters are kept. ``given``: fields of ``config``
        that the operator has set. ``group``: the process group of the ranks that experts are split over,
        which all load at the same time; None: this rank runs alone. Raises ConfigError."""
        vllm_arguments = arguments(config, model_dir, given)
        with startup_progress(progress):
            self._core = core = VllmCore(vllm_arguments, rank, group)
        self.info = core.info()
        self._loader: VllmAdapterLoader | None = None
        self.adapters: AdapterTable | None = None
        lora = self.info.lora
        if lora is not None:
            copies = AdapterCopies(run_dir, rank)
            self._loader = VllmAdapterLoader(core, lora, copies, BaseShapes(model_dir))
            self.adapters = AdapterTable(self._loader, lora.max_cpu_loras)
        self.can_sleep = core.can_sleep
        self._profiler = TorchProfiler(core.device_type)
        self._streams = VllmStreams(config, self.info, self.info.max_num_seqs, self.adapters)
        self._slots: dict[str, int] = {}
        """Slot of each request, by its id in vLLM."""
        self._request_ids: dict[int, str] = {}
        """The reverse."""
        self._latest: tuple[list[str], Slots] = [], np.zeros(0, np.intp)
        """The request ids of the latest step, and their slots."""
        self._num_added = 0
        """Requests given to vLLM since the start; the next request's id."""
        self._broken = False
        """A step of vLLM's has raised."""

    def close(self) -> None:
        self._core.close()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        self._streams.submit(server, request)

    def drop_server(self, server: int) -> None:
        slots = self._streams.drop_server(server)
        self._core.abort([self._request_ids[slot] for slot in slots])
        self._release(slots)

    def fail_all(self, code: str, message: str) -> StepRows:
        if not self._broken:
            self._core.abort(list(self._slots))
        self._slots.clear()
        self._request_ids.clear()
        return self._streams.fail_all(code, message)

    def _admit(self) -> None:
        """Give vLLM as many waiting requests as there are free slots."""
        while (first := self._streams.next_waiting()) is not None:
            request_id = str(self._num_added)
            try:
                self._core.add(request_id, first.request, request_of(first.adapter))
            except RequestRejected as error:
                self._streams.queue.fail(first, error.code, str(error))
                continue
            self._num_added += 1
            slot = self._streams.begin(first)
            self._slots[request_id] = slot
            self._request_ids[slot] = request_id

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._slots[self._request_ids.pop(slot)]
        self._streams.release(slots)

    # -- the step

    def has_work(self) -> bool:
        streams = self._streams
        queue = streams.queue
        return bool(streams.aborted or queue or queue.has_finished()) or self._core.has_work()

    can_step = has_work

    def step(self) -> StepRows:
        """Admit waiting streams, run a step of vLLM's, settle its output. Raises what vLLM raises."""
        parts = [self._take_aborted()] if self._streams.aborted else []
        self._admit()
        if self._streams.queue.has_finished():
            parts.append(self._streams.queue.take_finished())
        try:
            output = self._core.step()
        except Exception:
            self._broken = True
            raise
        if output.ids:
            parts += self._settle(output)
        elif self._core.stalled():
            time.sleep(STALLED_WAIT_S)
        return concat_rows(parts)

    def dummy_step(self) -> None:
        self._core.dummy_step()

    def _take_aborted(self) -> StepRows:
        """The ends of aborted streams, with their held tokens; frees their slots."""
        slots, rows = self._streams.take_aborted()
        self._core.abort([self._request_ids[slot] for slot in slots])
        self._release(slots)
        return rows

    def _settle(self, output: VllmStepOutput) -> list[StepRows]:
        """Append vLLM's output to the slots, make the rows that are due, and free slots of ended streams."""
        tokens = output.tokens
        each = np.fromiter(chain.from_iterable(tokens), np.int32)
        count = None
        if len(each) != len(tokens) or not all(tokens):
            count = np.fromiter(map(len, tokens), np.intp, len(tokens))
        parts, ended = self._streams.settle(self._slots_of(output.ids), each, count, output.events)
        self._release(ended)
        return parts

    def _slots_of(self, request_ids: list[str]) -> Slots:
        """Slots of ``request_ids``, which are mostly those of the previous step; ids are never reused."""
        if request_ids != self._latest[0]:
            slots = self._slots
            self._latest = request_ids, np.array([slots[name] for name in request_ids], np.intp)
        return self._latest[1]

    # -- reporting

    def load(self) -> Load:
        return Load(
            waiting=len(self._streams.queue),
            running=self._streams.table.running(),
            kv_used=self._core.counts.kv_usage,
            generated=self._streams.table.generated,
        )

    def metrics(self) -> dict[str, float]:
        return self._core.counts.metrics()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        core = self._core
        if method in ("sleep", "wake_up") and not core.can_sleep:
            raise ValueError("vLLM's engine sleeps only when it is started with -- --enable-sleep-mode")
        match method:
            case "reset_prefix_cache":
                if not core.reset_prefix_cache():
                    raise ValueError("the prefix cache cannot be reset while requests use it; try again")
            case "sleep":
                core.reset_prefix_cache()
                core.sleep(arguments["level"])
            case "wake_up":
                if core.wake_up() and self._loader is not None:
                    self._loader.restore()
            case "start_profile":
                self._profiler.start()
            case "stop_profile":
                return self._profiler.stop(arguments["path"])
            case _:
                raise ValueError(f"the vllm engine has no operation {method!r}")
