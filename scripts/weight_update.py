"""How long an engine takes to replace its weights from shared memory, beside copying the same bytes twice.

    python -m scripts.weight_update [--model DIR] [--dtype float32] [--rounds 30] [--streams 16]

By turns in one run: the file's bytes, mapped, are copied into a buffer and from there into another one; an
engine opens the same file and copies it into its parameters; and the same while streams run, which are kept:
their pause is the longest time between two steps' rows around the update, with the KV cache as it is and with
the streams computed again.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.weights.weight_file import with_digest
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.weights.desired import WeightSource

DEMO_DIR = Path(penstock.__file__).parent / "demo"
SHARED = Path("/dev/shm")
"""Where files are memory, on Linux."""
PROMPT = np.arange(3, 203, dtype="<i4").tobytes()
STEPS = 20
"""Steps before and after an update under load."""


class TwiceCopied:
    """A file whose bytes are copied from its mapping to a buffer, and on to another one."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self._first = np.zeros(self.size, np.uint8)
        self._second = np.zeros(self.size, np.uint8)

    def measure(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            whole = np.frombuffer(mapped, np.uint8)
            self._first[:] = whole
            self._second[:] = self._first
            del whole
        return time.perf_counter() - began


def update(engine: TorchEngine, source: WeightSource, *, drop_cache: bool) -> float:
    """Replace the weights by those of a file, whose digest is compared. Returns the seconds."""
    began = time.perf_counter()
    plan = engine.weights.plan([source])
    engine.weights.load(plan, drop_cache=drop_cache, in_step=False, tick=lambda: None)
    return time.perf_counter() - began


def pause_of_streams(
    engine: TorchEngine, source: WeightSource, streams: int, *, drop_cache: bool
) -> tuple[float, float]:
    """Seconds between two steps' rows: the median, and the longest, in which the weights are replaced."""
    for stream in range(streams):
        sampling = SamplingParams(2 * STEPS + 2, stream, ignore_eos=True)
        engine.submit(0, Submit(stream, PROMPT, sampling))
    at, gaps = time.perf_counter(), []
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.hold(Hold.ALL)
            while engine.can_step():
                engine.step()
            update(engine, source, drop_cache=drop_cache)
            engine.hold(Hold.NOTHING)
        while not len(engine.step().stream):
            pass
        now = time.perf_counter()
        gaps.append(now - at)
        at = now
    engine.fail_all("done", "measured")
    return statistics.median(gaps[STEPS // 2 :]), gaps[STEPS]


def report(model: Path, dtype: str, rounds: int, streams: int) -> str:
    """Measure by turns; returns the table's row."""
    config = ServeConfig(dtype=dtype, kv_cache_memory=64 << 20, max_num_seqs=max(streams, 1), device="cpu")
    engine = TorchEngine(config, str(model), lambda text, fraction: None)
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as directory:
        path = Path(directory) / "weights.safetensors"
        kind = getattr(torch, dtype)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(model.glob("*.safetensors")):
            tensors |= {name: tensor.to(kind) for name, tensor in load_file(file).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        source = with_digest(WeightSource(str(path)))
        copied = TwiceCopied(path)
        twice, once = [], []
        for _ in range(rounds):
            twice.append(copied.measure())
            once.append(update(engine, source, drop_cache=True))
        kept = [pause_of_streams(engine, source, streams, drop_cache=False) for _ in range(5)]
        dropped = [pause_of_streams(engine, source, streams, drop_cache=True) for _ in range(5)]
    copying, updating = statistics.median(twice), statistics.median(once)
    step = statistics.median(step for step, _ in kept + dropped)
    pauses = [statistics.median(pause for _, pause in each) for each in (kept, dropped)]
    cells = [
        dtype,
        f"{copied.size / 1e6:.1f} MB",
        *(f"{seconds * 1e3:.2f} ms" for seconds in (copying, updating)),
        f"{updating / copying:.2f}",
        *(f"{seconds * 1e3:.1f} ms" for seconds in (step, *pauses)),
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO_DIR)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], action="append")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--streams", type=int, default=16)
    options = parser.parse_args(arguments)
    print("| dtype | file | copied twice | update | ratio | step | pause, cache kept | cache dropped |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dtype in options.dtype or ["float32", "bfloat16"]:
        print(report(options.model, dtype, options.rounds, options.streams))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
