"""The machine on which a measurement runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

from penstock import __version__


class Machine(msgspec.Struct, frozen=True):
    """The machine and versions of a measurement."""

    cpu: str
    cores: int
    system: str
    python: str
    penstock: str

    def __str__(self) -> str:
        return (
            f"penstock {self.penstock}, Python {self.python}, {self.system}, {self.cpu}, {self.cores} cores"
        )


def this_machine() -> Machine:
    """This machine; ``cores`` counts those that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        cpu=_cpu_model(),
        cores=cores,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        penstock=__version__,
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
