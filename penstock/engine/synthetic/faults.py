"""The fault of ``--synthetic-fault``, KIND@STEP."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.synthetic.script_player import break_engine


class InjectedFault(RuntimeError):
    """The fault ``error@N``."""


class Faults:
    """Counts steps with work, from 0, and injects the fault in its step."""

    def __init__(self, fault: str | None, sleep: Callable[[float], None] = time.sleep) -> None:
        kind, _, step = (fault or "").partition("@")
        self._kind, self._at = kind, int(step) if step else -1
        self._sleep = sleep
        self._steps = 0

    def inject(self) -> str:
        """To be called once a step. Raises InjectedFault, ends the process or hangs; or returns the message
        with which a stream is to fail: empty, none is."""
        step = self._steps
        self._steps += 1
        if step != self._at:
            return ""
        if self._kind == "error":
            raise InjectedFault(f"injected by --synthetic-fault error@{step}")
        if self._kind != "stream-error":
            break_engine(self._kind, self._sleep)
        return f"injected by --synthetic-fault stream-error@{step}"
