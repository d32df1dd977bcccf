"""Sleep mode: an engine without streams gives its memory back until it is woken.

Level 0 is awake. Level 1 frees the KV cache and moves the weights off the device; level 2 drops the weights,
which are loaded again on waking. The level is a desired state (:mod:`.state_reconciler`): to prepare sleep
is to refuse new streams and end or finish the running ones; to prepare waking is to allocate the memory,
which may fail. Before a level is set, all engines hold: they refuse streams and have none. So no rank of a
group frees its memory while another one can begin a wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.base import Engine, RequestRejected
from penstock.wire.messages import SLEEP, SLEEPING

AWAKE = 0
MAX_LEVEL = 2
ENDED = "The server was put to sleep while this request ran."
REFUSED = "The engine is put to sleep."


class SleepState:
    """The sleep level of an engine, for :class:`.state_reconciler.StateReconciler`."""

    name = SLEEP
    default: Mapping[str, Any] = {"level": AWAKE}

    def __init__(
        self,
        engine: Engine,
        end_streams: Callable[[str, str], None],
        is_idle: Callable[[], bool],
        is_paused: Callable[[], bool],
    ) -> None:
        """``end_streams(code, message)`` ends every stream of the engine; ``is_idle()``: whether the engine
        has no work left; ``is_paused()``: whether a pause keeps its streams from ending."""
        self._engine = engine
        self._end_streams = end_streams
        self._is_idle = is_idle
        self._is_paused = is_paused
        self._level = AWAKE
        self._next: int | None = None
        """The level that is being prepared."""
        self._next_holds = self._holds = False
        """Whether the engine refuses streams at any level."""

    @property
    def level(self) -> int:
        """0: awake."""
        return self._level

    def refusal(self) -> RequestRejected | None:
        """Why new streams are refused; None while the engine is awake and not about to sleep."""
        if self._level == AWAKE and not self._next and not self._holds:
            return None
        return RequestRejected(REFUSED, SLEEPING)

    def prepare(self, value: dict[str, Any]) -> None:
        """Begin the part of the change that may fail or take time. A failed prepare changes nothing.

        ``value``: ``level`` and, to fall asleep, ``mode``: ``abort`` ends streams, ``wait`` lets them finish.
        With ``hold`` the engine only refuses streams, and gets rid of those it has. Raises ValueError, and
        what waking raises.
        """
        level, mode = value.get("level"), value.get("mode", "abort")
        if not isinstance(level, int) or not AWAKE <= level <= MAX_LEVEL:
            raise ValueError(f"level is {level!r}, not 0 to {MAX_LEVEL}")
        if mode not in ("abort", "wait"):
            raise ValueError(f"mode is {mode!r}, not abort or wait")
        if level != AWAKE and not self._engine.can_sleep:
            raise ValueError("this engine cannot sleep")
        if level == AWAKE and self._level != AWAKE:
            self._engine.call("wake_up", {})
        self._next, self._next_holds = level, bool(value.get("hold"))
        if level != AWAKE and mode == "abort" and self._engine.has_work():
            self._end_streams(SLEEPING, ENDED)

    def prepared(self, *, firm: bool) -> bool:
        """Whether :meth:`commit` could run now. An engine that is to sleep less stays as it is if the level
        is ``firm``, and one whose streams a pause keeps waits; otherwise raises ValueError."""
        assert self._next is not None  # it is being prepared
        if AWAKE < self._next < self._level and not firm:
            raise ValueError(
                f"level is {self._next}, but the engine sleeps at level {self._level}: wake it first"
            )
        if self._next == AWAKE or self._is_idle():
            return True
        if not firm and self._engine.has_work() and self._is_paused():
            raise ValueError(
                "mode is 'wait', but a pause keeps the streams: resume first, or sleep with mode 'abort'"
            )
        return False

    def commit(self, generation: int = 0) -> None:
        """Make the prepared change."""
        level, self._next = self._next, None
        assert level is not None  # it was prepared
        if not self._next_holds:
            if level > self._level:
                self._engine.call("sleep", {"level": level})
            if level == AWAKE or level > self._level:
                self._level = level
        self._holds = self._next_holds

    def settle(self) -> None:
        """Nothing is kept of what was before."""

    def abort(self) -> None:
        """Undo :meth:`prepare`."""
        if self._next == AWAKE and self._level != AWAKE:
            self._engine.call("sleep", {"level": self._level})
        self._next = None

    def result(self) -> dict[str, int]:
        """The level."""
        return {"level": self._level}
