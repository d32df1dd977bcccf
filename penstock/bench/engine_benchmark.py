"""``penstock bench engine``: CPU time and garbage collector objects of a decode step, without a model.

The loop of an engine process runs here, with its scheduler, rows and socket, and a model that computes
nothing. Another process receives the frames, as an API server does.
"""

from __future__ import annotations

import contextlib
import gc
import select
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Literal, Self

import msgspec

from penstock.bench.deadline import ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.frame_reader import ReaderPlan
from penstock.bench.machine import Machine, this_machine
from penstock.bench.noop_engine import TOKEN, NoOpEngine
from penstock.bench.tables import format_table
from penstock.config.bench import BenchEngineConfig
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.process import EngineLoop
from penstock.wire.control import SupervisorCommand
from penstock.wire.sockets import FRAMES_IN_FLIGHT, RouterSocket, engine_address

STEPS_AT_A_TIME = FRAMES_IN_FLIGHT // 2
"""Steps between two waits for the reader. Its queue has room for their frames: a frame that finds no room
would wait for a step that does not come."""
WARMUP_STEPS = 2 * STEPS_AT_A_TIME
READER_SECONDS = 60.0
"""Maximum time for the reader to start, and to read the frames of :data:`STEPS_AT_A_TIME` steps."""


class EngineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. Milliseconds are CPU time of the whole process, including ZMQ's thread.

    ``tracked_objects``: growth in objects that the garbage collector tracks, over the measured steps.
    ``collections``: its collections meanwhile, in all generations, at ``gc_threshold``.
    """

    rows: int
    sequence_length: int
    steps: int
    host_ms_per_step: float
    host_ms_per_step_median: float
    host_us_per_row: float
    tokens_per_row: int
    host_us_per_token: float
    tracked_objects: int
    tracked_objects_per_step: float
    collections: int
    gc_threshold: tuple[int, int, int]


class EngineBenchmarkReport(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, one per pair of ``--rows`` and ``--sequence-length``, and the figures of the first."""

    host_ms_per_step: float
    tracked_objects_per_step: float
    collections: int
    runs: list[EngineRun]
    machine: Machine


def render(report: EngineBenchmarkReport) -> str:
    """The report as a table."""
    lines = [
        f"{'rows':>6} {'length':>8} {'ms/step':>9} {'median':>8} {'us/row':>8} {'us/token':>9} "
        f"{'objects':>8} {'GCs':>5}"
    ]
    lines += [
        f"{run.rows:>6,} {run.sequence_length:>8,} {run.host_ms_per_step:>9.3f} "
        f"{run.host_ms_per_step_median:>8.3f} {run.host_us_per_row:>8.3f} {run.host_us_per_token:>9.3f} "
        f"{run.tracked_objects:>8,} "
        f"{run.collections:>5,}"
        for run in report.runs
    ]
    machine = report.machine
    lines += ["", f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}"]
    return "\n".join(lines)


def measure(config: BenchEngineConfig, say: ProgressCallback) -> EngineBenchmarkReport:
    """Run all measurements; ``say`` gets a line before each. Raises BenchError."""
    runs = []
    for rows in config.rows:
        for length in config.sequence_length:
            say(f"{rows:,} rows at sequence length {length:,}: {config.steps:,} steps")
            with _MeasuredEngine(config, rows, length, config.steps) as engine:
                runs.append(engine.run())
    first = runs[0]
    return EngineBenchmarkReport(
        host_ms_per_step=first.host_ms_per_step,
        tracked_objects_per_step=first.tracked_objects_per_step,
        collections=first.collections,
        runs=runs,
        machine=this_machine(),
    )


class EngineComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two measurements by turns: the rounds of both, and the ratio of the first one's median milliseconds per
    step to the second one's in the same round. ``changes``: the options of the second that differ."""

    changes: str
    ratio: float
    """The median."""
    least: float
    most: float
    first: list[EngineRun]
    second: list[EngineRun]
    machine: Machine


def compare(config: BenchEngineConfig, other: BenchEngineConfig, say: ProgressCallback) -> EngineComparison:
    """Run both by turns; ``say`` gets a line after each round. Raises BenchError."""
    sides: list[tuple[_MeasuredEngine, list[EngineRun]]] = []
    with contextlib.ExitStack() as stack:
        for each in (config, other):
            engine = _MeasuredEngine(each, each.rows[0], each.sequence_length[0], config.rounds * each.steps)
            sides.append((stack.enter_context(engine), []))
        for number in range(1, config.rounds + 1):
            for engine, runs in sides if number % 2 else reversed(sides):
                runs.append(engine.run())
            costs = ", ".join(f"{runs[-1].host_ms_per_step_median:.3f}" for _, runs in sides)
            say(f"round {number} of {config.rounds}: {costs} ms per step")
    (_, first), (_, second) = sides
    ratios = [
        one.host_ms_per_step_median / two.host_ms_per_step_median
        for one, two in zip(first, second, strict=True)
    ]
    return EngineComparison(
        changes=config.compare_with or "",
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
        first=first,
        second=second,
        machine=this_machine(),
    )


def render_comparison(report: EngineComparison) -> str:
    """The report as text."""
    table = [("", "ms/step", "us/token", "objects/step")]
    for name, runs in (("first", report.first), ("second", report.second)):
        table.append(
            (
                name,
                f"{statistics.median(run.host_ms_per_step_median for run in runs):.3f}",
                f"{statistics.median(run.host_us_per_token for run in runs):.3f}",
                f"{statistics.median(run.tracked_objects_per_step for run in runs):.3f}",
            )
        )
    return "\n".join(
        [
            f"{report.first[0].rows:,} rows; second: the same with {report.changes}",
            f"medians of {len(report.first)} rounds each, by turns",
            "",
            *format_table(table),
            "",
            f"first / second: {report.ratio:.3f} ({report.least:.3f} to {report.most:.3f})",
            str(report.machine),
        ]
    )


class _MeasuredEngine:
    """An engine loop whose streams all decode, and the process that reads its frames, within a block."""

    def __init__(self, config: BenchEngineConfig, rows: int, sequence_length: int, steps: int) -> None:
        """``steps``: that :meth:`run` may make in all."""
        self._rows, self._length = rows, sequence_length
        self._tokens_per_row = 1 + config.accept
        self._steps = config.steps
        # more than the steps that run make, so that no stream ends
        output = (WARMUP_STEPS + steps + config.stream_interval + 2) * self._tokens_per_row
        self._engine = NoOpEngine(
            rows,
            sequence_length + output,
            rows * max(sequence_length, self._tokens_per_row),
            config.accept,
            config.logprobs,
        )
        self._plan = ReaderPlan(
            address="",
            streams=rows,
            prompt_tokens=sequence_length,
            prompt_token=TOKEN,
            max_tokens=output,
            every=STEPS_AT_A_TIME,
            interval=config.stream_interval,
            logprobs=-1 if config.logprobs is None else config.logprobs,
            servers=config.api_server_count,
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Submit all streams, and make the steps that are not measured. Raises BenchError."""
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
            address = engine_address(directory, 0)
            socket = RouterSocket(address)
            stack.callback(socket.close)
            loop = EngineLoop(self._engine, socket, EngineIdentity(0))
            reader = stack.enter_context(_ReaderProcess(msgspec.structs.replace(self._plan, address=address)))
            self._stepper = _Stepper(loop, reader)
            while not self._engine.has_work():
                loop.run_once(reader)
            for _ in self._engine.take_turns(self._plan.interval):
                loop.run_once(reader)
            for _ in range(WARMUP_STEPS // STEPS_AT_A_TIME):
                self._stepper.run(STEPS_AT_A_TIME)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> EngineRun:
        """Measure the steps of one round. Raises BenchError."""
        return _steady(self._stepper, self._rows, self._length, self._steps, self._tokens_per_row)


def _steady(stepper: _Stepper, rows: int, sequence_length: int, steps: int, tokens_per_row: int) -> EngineRun:
    """Measure ``steps`` steps in which no stream starts or ends."""
    parts = -(-steps // STEPS_AT_A_TIME)
    cpu_s = [0.0] * parts  # allocated before objects are counted
    collections = _CollectionCounter()
    gc.collect()
    with collections:
        before = len(gc.get_objects())
        for part in range(parts):
            cpu_s[part] = stepper.run(min(STEPS_AT_A_TIME, steps - part * STEPS_AT_A_TIME))
        growth = len(gc.get_objects()) - before
    full = cpu_s[: steps // STEPS_AT_A_TIME] or cpu_s
    ms = sum(cpu_s) * 1000 / steps
    return EngineRun(
        rows=rows,
        sequence_length=sequence_length,
        steps=steps,
        host_ms_per_step=ms,
        host_ms_per_step_median=statistics.median(full) * 1000 / min(steps, STEPS_AT_A_TIME),
        host_us_per_row=ms * 1000 / rows,
        tokens_per_row=tokens_per_row,
        host_us_per_token=ms * 1000 / rows / tokens_per_row,
        tracked_objects=growth,
        tracked_objects_per_step=growth / steps,
        collections=collections.made,
        gc_threshold=gc.get_threshold(),
    )


class _CollectionCounter:
    """Counts the garbage collections within a block."""

    def __init__(self) -> None:
        self.made = 0

    def __enter__(self) -> None:
        gc.callbacks.append(self._on_collection)

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        self.made += phase == "start"


class _Stepper:
    """Runs steps of the loop and waits for the reader between them."""

    def __init__(self, loop: EngineLoop, reader: _ReaderProcess) -> None:
        self._loop = loop
        self._reader = reader
        self._steps = 0

    def run(self, steps: int) -> float:
        """Run at most STEPS_AT_A_TIME steps. Returns their CPU seconds, without the wait for the reader."""
        step, reader = self._loop.run_once, self._reader
        began = time.process_time()
        for _ in range(steps):
            step(reader)
        taken = time.process_time() - began
        self._steps += steps
        reader.wait_for(self._steps // STEPS_AT_A_TIME)
        return taken


class _ReaderProcess:
    """The process that reads frames; also the loop's control channel, which receives no commands."""

    def __init__(self, plan: ReaderPlan) -> None:
        self._lines = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.bench.frame_reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C must not kill it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._process.stdin.write(msgspec.json.encode(plan) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for(self, lines: int) -> None:
        """Wait until it has written this many lines in total. Raises BenchError after READER_SECONDS."""
        while self._lines < lines:
            if not select.select([self._stdout], [], [], READER_SECONDS)[0]:
                raise BenchError(f"the frames were not read within {READER_SECONDS:.0f} s")
            data = self._stdout.read(4096)
            if not data:
                raise BenchError(f"the reader ended with exit code {self._process.wait()}")
            self._lines += len(data)

    # -- the interface of a control channel

    def receive(self) -> list[SupervisorCommand]:
        """No commands. Raises BenchError when the process has exited: nothing would wake the loop."""
        if self._process.poll() is not None:
            raise BenchError(f"the reader ended with exit code {self._process.returncode}")
        return []

    def heartbeat(self) -> None:
        """Do nothing."""

    def fileno(self) -> int:
        return self._stdout.fileno()
