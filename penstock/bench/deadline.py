"""The time limit of a measurement, and its progress messages."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.bench.errors import BenchError

ProgressCallback = Callable[[str], None]
"""Gets one line of text for each stage of a measurement."""


class Deadline:
    """The time limit that all stages of a measurement share (``--timeout``)."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self, stage: str) -> float:
        """Seconds that are left for ``stage``, which is next. Raises BenchError when there are none."""
        left = self._end - self._clock()
        if left <= 0:
            raise BenchError(f"--timeout: {self._seconds:g} s are over before {stage}")
        return left
