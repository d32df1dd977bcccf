"""The C floor: CPU time of a C program that sends chunks of the same size over the same number of sockets."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Self

from penstock.bench.errors import BenchError

COMPILER = "cc"
SENDS = 131_072
"""Approximate sends of one measurement: 1,024 streams of 128 tokens, half a second of CPU time."""
MAX_STEPS = 128
"""Sends to one socket before the program waits for the reader, see ``kernel_floor.c``."""
COMPILE_SECONDS = 60.0


class KernelFloor:
    """``kernel_floor.c``, compiled into a temporary directory; use it as a context.

    Without a C compiler ``available`` is False, and ``measure`` must not be called.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-floor-")
        self._program = Path(self._directory.name) / "floor"
        self.available = shutil.which(COMPILER) is not None

    def __enter__(self) -> Self:
        """Raises BenchError when the compiler fails."""
        try:
            if self.available:
                self._compile()
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()

    def measure(self, sockets: int, chunk: int, *, times: int, seconds: float) -> list[float]:
        """Sends per CPU-second of the sender, ``times`` times over, each with ``sockets`` fresh connections.

        ``chunk`` is the size of a send in bytes, ``seconds`` the time limit of each measurement. Sender and
        reader run on different cores, where the machine has two and allows processes to be pinned.
        Raises BenchError when the program fails or exceeds the time limit.
        """
        steps = min(MAX_STEPS, max(1, SENDS // sockets))
        bursts = max(1, SENDS // (sockets * steps))
        numbers = [sockets, chunk, steps, bursts, max(1, int(seconds))]
        results = []
        for _ in range(times):
            line = self._run([*map(str, numbers), *_cores()], seconds)
            sends, cpu_us = map(int, line.split())
            results.append(sends / max(cpu_us, 1) * 1e6)
        return results

    def _compile(self) -> None:
        with resources.as_file(resources.files("penstock.bench") / "kernel_floor.c") as source:
            command = [COMPILER, "-O2", "-o", str(self._program), str(source)]
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        if result.returncode:
            raise BenchError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")

    def _run(self, arguments: list[str], seconds: float) -> str:
        command = [str(self._program), *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                raise BenchError("the C floor was not measured in time") from None
            finally:
                process.kill()  # its reader exits with it
        if process.returncode:
            raise BenchError(f"the C floor failed with exit code {process.returncode}: {err.strip()}")
        return out


def _cores() -> list[str]:
    """Arguments that pin sender and reader to a core each; empty where that is impossible."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[0]), str(cores[1])] if len(cores) > 1 else []
