"""Stage c: steps of the engine in one process: their time, the host's phases, and the device's idle time;
then steps with and without CUDA graphs by turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.decoding import SteppedEngine
from scripts.gpu.device_time import DeviceTime, attention_kernels, record
from scripts.gpu.host_phases import timed_phases
from scripts.gpu.measuring import STARTS, Stage, tell
from scripts.gpu.shapes import Shape, find_shape

GIB = 1 << 30
ROOM, ROOM_EAGER = 6 * GIB, 2 * GIB
"""Of the device: what the first engine's cache leaves for the largest step and all CUDA graphs, and the
second engine's, which has no graphs and computes in the memory that the first keeps for steps."""
WARM_STEPS, STEPS, ROUNDS, PROFILED = 6, 10, 4, 8
TAKEN = WARM_STEPS + STEPS * ROUNDS + STEPS + PROFILED  # steps of a stream
OUTPUT = 4 * TAKEN
"""Tokens that a stream may have: it is aborted before."""
TURNS = 5
TOP = 6
"""Kernels of a table."""


@dataclass(frozen=True)
class Plan:
    """What is measured of a shape: numbers of streams or prompts, and the tokens of each prompt;
    ``kv_bytes``: a cache that holds them all."""

    decodes: list[tuple[int, int]]
    prefills: list[tuple[int, int]]
    turns: list[tuple[int, int]]
    long_decodes: list[tuple[int, int]]
    kv_bytes: int
    kv_bytes_eager: int


def plan_of(shape: Shape, *, tiny: bool) -> Plan:
    if tiny:
        return Plan([(4, 32), (1, 32)], [(1, 100)], [(1, 32)], [(1, 128)], 64 << 20, 16 << 20)
    turns = [(64, 512), (1, 512)]
    if shape.name == "opt-125m":
        decodes = [(64, 512), (1, 512), (256, 512), (1024, 512)]
        return Plan(decodes, [(2, 1024), (8, 1024)], turns, [(64, 1700)], 24 * GIB, 4 * GIB)
    decodes = [(64, 512), (1, 512), (256, 512), (1024, 128)]
    return Plan(decodes, [(1, 2048), (1, 8192)], turns, [(1, 16000), (64, 2048)], 30 * GIB, 6 * GIB)


class Steps:
    """The measurements of one shape, which share an engine."""

    def __init__(self, stage: Stage, shape: Shape, folder: str) -> None:
        self._stage = stage
        self._shape = shape
        self._folder = folder
        self._plan = plan_of(shape, tiny=stage.tiny)
        self._engine: SteppedEngine | None = None

    def run(self) -> None:
        with self._measurement(STARTS, "profiler", 20) as values:
            # it has to know the graphs, so it starts before they are made
            values["kernels"] = record(self._stage.device, 1, self._anything).kernels
        with self._measurement(STARTS, "steps", 60) as values:
            began = time.perf_counter()
            self._engine = self._start(self._cache_bytes())
            values["seconds"] = time.perf_counter() - began
            values["dtype"] = self._engine.engine.info.dtype
            values["KV cache tokens"] = self._engine.engine.info.kv_cache_tokens
        if self._engine is None:
            raise SystemExit("the engine did not start")
        self._decodes(self._engine, self._plan.decodes)
        for count, prompt in self._plan.prefills:
            name = f"{count * prompt:,} tokens, {count} prompt{'s' if count > 1 else ''}"
            if not self._fits(self._engine, name, count, prompt):
                continue
            with self._measurement("c. prefill", name, 15) as values:
                self._prefill(self._engine, values, count, prompt)
        self._without_graphs(self._engine)
        self._decodes(self._engine, self._plan.long_decodes)

    def _measurement(self, table: str, name: str, seconds: float) -> AbstractContextManager[dict[str, Any]]:
        return self._stage.measurement(table, f"{self._shape.name}: {name}", seconds)

    def _decodes(self, stepped: SteppedEngine, sizes: list[tuple[int, int]]) -> None:
        for streams, prompt in sizes:
            name, device = _decode_name(streams, prompt), None
            if not self._fits(stepped, name, streams, prompt + TAKEN):
                continue
            with self._measurement("c. steps", name, 25) as values:
                device = self._decode(stepped, values, streams, prompt)
            if device is not None:
                self._tell_kernels(name, device)

    def _cache_bytes(self) -> int:
        """Of the first engine: what the plan needs, as far as it is free beside the weights."""
        room = self._free() - 2 * self._shape.parameters - ROOM
        return int(min(self._plan.kv_bytes, max(GIB, room)))

    def _free(self) -> float:
        return torch.cuda.mem_get_info()[0] if self._stage.device == "cuda" else float("inf")

    def _fits(self, stepped: SteppedEngine, name: str, streams: int, tokens: int) -> bool:
        """Whether the KV cache holds so many streams of so many tokens, and two blocks more of each."""
        return self._has(
            name, streams * (tokens + 32), stepped.engine.info.kv_cache_tokens, "KV cache tokens"
        )

    def _has(self, name: str, need: float, has: float, what: str) -> bool:
        """Whether there is enough; tells if not."""
        if need > has:
            tell("skipped", f"{self._shape.name}: {name}", {f"{what} needed": need, "there are": has})
        return need <= has

    def _start(self, kv_bytes: int, **options: object) -> SteppedEngine:
        if self._stage.tiny:
            options |= {"max_num_seqs": 16, "threads": 1}
        return SteppedEngine(self._shape, self._folder, self._stage.device, kv_bytes, **options)

    def _decode(
        self, stepped: SteppedEngine, values: dict[str, float], streams: int, prompt: int
    ) -> DeviceTime:
        """The step of ``streams`` decodes: as it runs, by the host's phases, and by the device's kernels."""
        stepped.submit(self._shape.prompts(streams, prompt), min(OUTPUT, self._shape.longest - prompt))
        try:
            seconds = stepped.until_decoding()
            values["prefill tokens/s"] = streams * prompt / seconds
            stepped.advance(WARM_STEPS)
            values["step ms"] = ms = stepped.step_ms(STEPS, ROUNDS)
            values["tokens/s"] = streams * 1000 / ms
            context = prompt + WARM_STEPS + STEPS * ROUNDS // 2
            per_token = self._shape.kv_bytes_per_token(stepped.dtype_bytes)
            values["KV GB"] = streams * context * per_token / 1e9
            values |= self._phases(stepped)
            device = record(self._stage.device, PROFILED, lambda: stepped.advance(1))
            values["device busy ms"] = device.busy_ms
            values["device idle %"] = 100 * (1 - device.busy_ms / ms)
            values["kernels"] = device.kernels
            values["attention ms"] = device.of(attention_kernels())
        finally:
            stepped.end()
        return device

    def _anything(self) -> None:
        torch.ones(8, device=self._stage.device).sum()

    def _tell_kernels(self, name: str, device: DeviceTime) -> None:
        for kernel, ms in list(device.by_name.items())[:TOP]:
            values = {"ms/step": ms, "%": 100 * ms / device.busy_ms}
            tell("c. kernels", f"{self._shape.name}: {name}: {kernel}", values)

    def _phases(self, stepped: SteppedEngine) -> dict[str, float]:
        """Milliseconds per step of the host in each phase, of the CPU clock in all, and of the rest."""
        cpu = time.process_time()
        with timed_phases() as spent:
            whole = stepped.step_ms(STEPS, 1)
        phases = {f"{phase} ms": seconds * 1000 / STEPS for phase, seconds in spent.items()}
        rest = {"rest ms": whole - sum(phases.values())}
        return phases | rest | {"host CPU ms": (time.process_time() - cpu) * 1000 / STEPS}

    def _prefill(self, stepped: SteppedEngine, values: dict[str, float], count: int, prompt: int) -> None:
        length = min(prompt, self._shape.longest - 2)
        times = [stepped.prefill_ms(self._shape.prompts(count, length, seed)) for seed in range(4)]
        values["ms"] = ms = statistics.median(times[1:])
        values["first ms"] = times[0]
        values["tokens/s"] = count * length * 1000 / ms
        values["prompts"], values["prompt tokens"] = count, length

    def _without_graphs(self, with_graphs: SteppedEngine) -> None:
        eager = None
        need = 2 * self._shape.parameters + self._plan.kv_bytes_eager + ROOM_EAGER
        if not self._has("steps without graphs", need / GIB, self._free() / GIB, "GiB"):
            return
        with self._measurement(STARTS, "steps without graphs", 40) as values:
            began = time.perf_counter()
            eager = self._start(self._plan.kv_bytes_eager, enforce_eager=True)
            values["seconds"] = time.perf_counter() - began
        for streams, prompt in self._plan.turns if eager is not None else []:
            with self._measurement("c. CUDA graphs", _decode_name(streams, prompt), 15) as values:
                assert eager is not None
                _by_turns(values, with_graphs, eager, self._shape.prompts(streams, prompt))


def _by_turns(
    values: dict[str, float], graphs: SteppedEngine, eager: SteppedEngine, prompts: list[list[int]]
) -> None:
    both = {"with graphs ms": graphs, "without ms": eager}
    for stepped in both.values():
        stepped.submit(prompts, OUTPUT)
    try:
        for stepped in both.values():
            stepped.until_decoding()
            stepped.advance(WARM_STEPS)
        times: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(TURNS):
            for name, stepped in both.items():
                times[name].append(stepped.step_ms(STEPS, 1))
    finally:
        for stepped in both.values():
            stepped.end()
    values |= {name: statistics.median(each) for name, each in times.items()}
    values["ratio"] = values["without ms"] / values["with graphs ms"]


def _decode_name(streams: int, prompt: int) -> str:
    return f"{streams:,} stream{'s' if streams > 1 else ''}, context {prompt:,}"


def main() -> None:
    stage = Stage("shape")
    stage.log_warnings()
    shape = find_shape(stage.options.shape, tiny=stage.tiny)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        Steps(stage, shape, shape.write(Path(folder))).run()


if __name__ == "__main__":
    main()
