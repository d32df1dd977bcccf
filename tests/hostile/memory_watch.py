"""Watches the memory of processes while they are attacked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import psutil

INTERVAL_S = 0.1
MIB = 1 << 20


class MemoryWatch:
    """Greatest growth of each process over its size at the start; use it as a context."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._base = {process: process.memory_info().rss for process in processes}
        self._most = dict(self._base)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL_S):
            for process, most in self._most.items():
                try:
                    self._most[process] = max(most, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    self._most[process] = 1 << 50  # it must not die

    @property
    def grown_mib(self) -> dict[str, float]:
        """By process title or number."""
        return {
            f"{_title(process)} ({process.pid})": (self._most[process] - base) / MIB
            for process, base in self._base.items()
        }


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:40].strip()
    except psutil.NoSuchProcess:
        return "a process that has died"
