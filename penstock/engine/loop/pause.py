"""Pause: an engine that computes no streams until it is resumed, and keeps its memory.

The value says what becomes of the streams that there are: ``abort`` ends them with what they have, ``wait``
lets them finish, ``keep`` leaves them where they are, to go on. New streams are refused, or with ``keep``
queued. A rank of a group still takes part in the others' steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.base import Hold, RequestRejected
from penstock.engine.loop.stream_gate import StreamGate
from penstock.wire.messages import PAUSE, PAUSED

REFUSED = "The engine is paused."
MODES = ("abort", "wait", "keep")


class PauseState:
    """Whether an engine is paused, for :class:`.state_reconciler.StateReconciler`."""

    name = PAUSE
    default: Mapping[str, Any] = {"paused": False, "mode": "abort"}

    def __init__(self, gate: StreamGate) -> None:
        self._gate = gate
        self._mode: str | None = None
        """How the engine was paused; None: it is not."""
        self._next: tuple[str | None] | None = None
        """The mode that is being prepared."""

    def refusal(self) -> RequestRejected | None:
        """Why new streams are refused; None: they are taken."""
        for mode in (self._mode, None if self._next is None else self._next[0]):
            if mode is not None and mode != "keep":
                return RequestRejected(REFUSED, PAUSED)
        return None

    def prepare(self, value: dict[str, Any]) -> None:
        """Begin to end, finish or keep the streams. ``value``: ``paused`` and ``mode``. Raises ValueError."""
        paused, mode = value.get("paused"), value.get("mode", "abort")
        if not isinstance(paused, bool):
            raise ValueError(f"paused is {paused!r}, not true or false")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, not {', '.join(MODES)}")
        if paused:  # those that were kept are computed again if they are to finish
            self._gate.hold(PAUSE, Hold.ALL if mode == "keep" else Hold.NOTHING)
        if paused and mode == "abort":
            self._gate.abort()
        self._next = (mode if paused else None,)

    def prepared(self, *, firm: bool) -> bool:
        """Whether :meth:`commit` could run now: with ``keep`` when nothing is computed, to resume at once,
        otherwise without work."""
        assert self._next is not None  # it is being prepared
        (mode,) = self._next
        return mode is None or (self._gate.is_still() if mode == "keep" else self._gate.is_idle())

    def commit(self, generation: int = 0) -> None:
        """Make the prepared change."""
        assert self._next is not None  # it was prepared
        (self._mode,), self._next = self._next, None
        self._hold()

    def settle(self) -> None:
        """Nothing is kept of what was before."""

    def abort(self) -> None:
        """Undo :meth:`prepare`; streams that were ended are."""
        self._next = None
        self._hold()

    def _hold(self) -> None:
        self._gate.hold(PAUSE, Hold.ALL if self._mode == "keep" else Hold.NOTHING)

    def result(self) -> dict[str, bool | str]:
        """Whether it is paused, and how."""
        return {"paused": self._mode is not None, "mode": self._mode or ""}
