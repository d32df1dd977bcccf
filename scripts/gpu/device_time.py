"""Where the device's time goes within steps, by PyTorch's profiler: how long it computes, and what."""

from __future__ import annotations

import collections
import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_EVENTS = ("cpu_op",)
NAME_CHARACTERS = 60


@dataclass(frozen=True)
class DeviceTime:
    """Of some steps. On a CPU, operators of PyTorch take the place of kernels.

    ``busy_ms``: union of the kernels' times; ``kernels``: their number; ``by_name``: milliseconds of each
    kernel, the longest first. All are means per step.
    """

    busy_ms: float
    kernels: float
    by_name: dict[str, float]

    def of(self, names: tuple[str, ...]) -> float:
        """Milliseconds per step of kernels whose name contains one of ``names``."""
        return sum(ms for name, ms in self.by_name.items() if any(part in name for part in names))


def attention_kernels() -> tuple[str, ...]:
    """Parts of the names of kernels that attend: PyTorch's, and Penstock's own, which have the names of their
    functions; not those that write the cache."""
    own: list[str] = []
    with contextlib.suppress(ImportError):  # no Triton: the CPU has none of them
        from penstock.engine.torch.cuda import kernels

        triton = ("JITFunction", "InterpretedFunction")
        own = [name for name, value in vars(kernels).items() if type(value).__name__ in triton]
    return ("attention", "flash", "fmha", *(name for name in own if "write" not in name))


def record(device: str, steps: int, step: Callable[[], object]) -> DeviceTime:
    """Profiles ``steps`` calls of ``step``. Only the device's own activity is recorded, so the host is slowed
    down little; times between kernels are not to be taken from here all the same. Raises RuntimeError when
    nothing was recorded, as where the driver lets nobody profile."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[activity]) as recorded:
            for _ in range(steps):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = spans_of(events, DEVICE_EVENTS if device == "cuda" else HOST_EVENTS)
    if not spans:
        raise RuntimeError("the profiler has recorded nothing")
    return summarise(spans, steps)


def spans_of(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> list[tuple[float, float, str]]:
    """Begin, end (microseconds) and name of the events of a Chrome trace with one of these categories."""
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") in kinds and "dur" in event
    ]


def summarise(spans: list[tuple[float, float, str]], steps: int) -> DeviceTime:
    """From begin, end (microseconds) and name of each kernel. Of spans within another one, which operators on
    a CPU have, only the outermost counts."""
    busy, count, end = 0.0, 0, float("-inf")
    by_name: dict[str, float] = collections.defaultdict(float)
    for begin, stop, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if stop <= end:
            continue
        busy += stop - max(begin, end)
        by_name[name[:NAME_CHARACTERS]] += (stop - begin) / 1000 / steps
        count, end = count + 1, stop
    ordered = dict(sorted(by_name.items(), key=lambda item: -item[1]))
    return DeviceTime(busy / 1000 / steps, count / steps, ordered)
