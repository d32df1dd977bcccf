"""Sleep mode: an engine without streams gives its memory back until it is woken.

Level 0 is awake. Level 1 frees the KV cache and moves the weights off the device; level 2 drops the weights,
which are loaded again on waking. The level changes by two-phase commit (:mod:`.two_phase`): to prepare sleep
is to refuse new streams and end or finish the running ones; to prepare waking is to allocate the memory,
which may fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.engine.base import Engine, RequestRejected
from penstock.wire.messages import SLEEPING

AWAKE = 0
MAX_LEVEL = 2
ENDED = "The server was put to sleep while this request ran."
REFUSED = "The engine is put to sleep."


class SleepState:
    """The sleep level of an engine, for :class:`.two_phase.TwoPhaseParticipant`."""

    name = "sleep"

    def __init__(
        self, engine: Engine, end_streams: Callable[[str, str], None], is_idle: Callable[[], bool]
    ) -> None:
        """``end_streams(code, message)`` ends every stream of the engine; ``is_idle()``: whether the engine
        has no work left."""
        self._engine = engine
        self._end_streams = end_streams
        self._is_idle = is_idle
        self._level = AWAKE
        self._next: int | None = None
        """The level that is being prepared."""

    @property
    def level(self) -> int:
        """0: awake."""
        return self._level

    def refusal(self) -> RequestRejected | None:
        """Why new streams are refused; None while the engine is awake and not about to sleep."""
        if self._level == AWAKE and not self._next:
            return None
        return RequestRejected(REFUSED, SLEEPING)

    def prepare(self, arguments: dict[str, Any]) -> None:
        """Begin the part of the change that may fail or take time. A failed prepare changes nothing.

        ``arguments``: ``level`` and, to fall asleep, ``mode``: ``abort`` ends streams, ``wait`` lets them
        finish. Raises ValueError, and what waking raises.
        """
        level, mode = arguments.get("level"), arguments.get("mode", "abort")
        if not isinstance(level, int) or not AWAKE <= level <= MAX_LEVEL:
            raise ValueError(f"level is {level!r}, not 0 to {MAX_LEVEL}")
        if mode not in ("abort", "wait"):
            raise ValueError(f"mode is {mode!r}, not abort or wait")
        if AWAKE < level < self._level:
            raise ValueError(f"level is {level}, but the engine sleeps at level {self._level}: wake it first")
        if level != AWAKE and not self._engine.can_sleep:
            raise ValueError("this engine cannot sleep")
        if level == AWAKE and self._level != AWAKE:
            self._engine.call("wake_up", {})
        self._next = level
        if level != AWAKE and mode == "abort" and self._engine.has_work():
            self._end_streams(SLEEPING, ENDED)

    def prepared(self, *, decided: bool) -> bool:
        """Whether :meth:`commit` could run now."""
        return self._next == AWAKE or self._is_idle()

    def commit(self) -> None:
        """Make the prepared change."""
        level, self._next = self._next, None
        assert level is not None  # it was prepared
        if level > self._level:
            self._engine.call("sleep", {"level": level})
        self._level = level

    def abort(self) -> None:
        """Undo :meth:`prepare`."""
        if self._next == AWAKE and self._level != AWAKE:
            self._engine.call("sleep", {"level": self._level})
        self._next = None

    def result(self) -> dict[str, int]:
        """The level."""
        return {"level": self._level}
