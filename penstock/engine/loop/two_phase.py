"""One engine's part in changes that all engines make or none, without I/O.

    settled ──PREPARE──► preparing ──► prepared ──COMMIT──► settled, changed
       ▲                     └────┬─────────┘
       └── ABORT, or all who asked for it are gone

One change is prepared at a time. COMMIT says that the change is decided, so it is made in any state: an
engine that was started again, or gave up what it had prepared as nobody seemed to want it any longer,
prepares it and makes it at once. Decisions are numbered; an older one than the latest changes nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.engine.loop.idempotency import RpcError
from penstock.wire.messages import CONFLICT, RpcCall, RpcPhase, RpcReply


class TwoPhaseState(Protocol):
    """A state of the engine that changes in two steps."""

    def prepare(self, arguments: dict[str, Any]) -> None:
        """Begin all that may fail or take time. Raises what it fails with, and has changed nothing then."""
        ...

    def prepared(self) -> bool:
        """Whether the change could be made at once."""
        ...

    def commit(self) -> Any:
        """Make the change; returns the receipt's result."""
        ...

    def abort(self) -> None:
        """Undo what was prepared."""
        ...


class TwoPhaseParticipant:
    """One state and its changes."""

    def __init__(self, name: str, state: TwoPhaseState) -> None:
        self.version = 0
        """Of the latest decision that was carried out."""
        self._name = name
        self._state = state
        self._key: str | None = None
        """The change that is prepared, or is going to be."""
        self._requesters: set[int] = set()
        """API servers that asked for it."""

    def begin(self, server: int, call: RpcCall) -> None:
        """Start what PREPARE or COMMIT asks for. Raises RpcError, and what the state raises."""
        if call.phase is RpcPhase.COMMIT:
            if call.version <= self.version:
                return
            if self._key != call.key:
                self._roll_back()
        elif self._key not in (None, call.key):
            raise RpcError(
                f"another change of {self._name} is under way, with the key {self._key!r}", CONFLICT
            )
        if self._key is None:
            self._state.prepare(call.arguments)
            self._key = call.key
        self._requesters.add(server)

    def try_reply(self, call: RpcCall) -> RpcReply | None:
        """The reply to what was begun; None while it is under way. Raises RpcError when something else has
        taken its place, and what the state raises."""
        if call.phase is RpcPhase.COMMIT and call.version <= self.version:
            if call.version < self.version:
                raise RpcError(f"a later change of {self._name} has taken its place", CONFLICT)
            return RpcReply(call.call, repeated=True)
        if self._key != call.key:
            raise RpcError(f"another change of {self._name} has taken its place", CONFLICT)
        if not self._state.prepared():
            return None
        if call.phase is RpcPhase.PREPARE:
            return RpcReply(call.call)
        self._key = None
        self._requesters.clear()
        result = self._state.commit()
        self.version = call.version
        return RpcReply(call.call, None, result)

    def withdraw(self, server: int, key: str | None = None) -> None:
        """An API server wants the change no longer: ABORT of ``key``, or it is gone. What nobody wants is
        undone; should it be decided all the same, COMMIT says so."""
        if self._key is None or key not in (None, self._key):
            return
        self._requesters.discard(server)
        if not self._requesters:
            self._roll_back()

    def _roll_back(self) -> None:
        if self._key is not None:
            self._key = None
            self._requesters.clear()
            self._state.abort()
