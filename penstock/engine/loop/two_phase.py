"""Two-phase commit, the engine's side: changes that all engines make or none. No I/O.

    settled ──PREPARE──► preparing ──► prepared ──COMMIT──► settled, changed
       ▲                     └────┬─────────┘
       └── ABORT, all requesters are gone, or it cannot be prepared

One change is prepared at a time. COMMIT means that the change is decided, so it is made in any state: an
engine that has restarted, or has rolled back because all requesters were gone, prepares and commits at once.
Decisions have version numbers; one older than the latest changes nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.engine.loop.idempotency import RpcError
from penstock.wire.messages import CONFLICT, RpcCall, RpcPhase, RpcReply


class ParticipantState(Protocol):
    """A state of an engine that changes by two-phase commit."""

    name: str

    def prepare(self, arguments: dict[str, Any]) -> None:
        """Begin the part of a change that may fail or take time. A failed prepare changes nothing. Raises
        ValueError."""
        ...

    def prepared(self, *, decided: bool) -> bool:
        """Whether :meth:`commit` could run now. ``decided``: the change is made in any case, as far as it can
        be. Otherwise raises ValueError when it cannot be made."""
        ...

    def commit(self) -> None:
        """Make the prepared change."""
        ...

    def abort(self) -> None:
        """Undo :meth:`prepare`."""
        ...

    def result(self) -> Any:
        """The result of a COMMIT: what the state is."""
        ...


class TwoPhaseParticipant:
    """One state of the engine that changes by two-phase commit."""

    def __init__(self, state: ParticipantState) -> None:
        self.version = 0
        """Version of the latest decision that was carried out."""
        self.name = state.name
        self._state = state
        self._key: str | None = None
        """Key of the change that is prepared or being prepared."""
        self._requesters: set[int] = set()
        """API servers that requested it."""

    @property
    def is_preparing(self) -> bool:
        """Whether a change is prepared or being prepared."""
        return self._key is not None

    def begin(self, server: int, call: RpcCall) -> None:
        """Start a PREPARE or COMMIT. Raises RpcError, and what the state raises."""
        if call.phase is RpcPhase.COMMIT:
            if call.version <= self.version:
                return
            if self._key != call.key:
                self._roll_back()
        elif self._key not in (None, call.key):
            raise RpcError(
                f"another change of {self.name} is under way, with the key {self._key!r}", CONFLICT
            )
        if self._key is None:
            self._state.prepare(call.arguments)
            self._key = call.key
        self._requesters.add(server)

    def try_reply(self, call: RpcCall) -> RpcReply | None:
        """The reply to a call that has begun; None while it is not finished. Raises RpcError when another
        change has replaced it, and what the state raises."""
        committing = call.phase is RpcPhase.COMMIT
        if committing and call.version <= self.version:
            if call.version < self.version:
                raise RpcError(f"a later change of {self.name} has taken its place", CONFLICT)
            return RpcReply(call.call, None, self._state.result(), repeated=True)
        if self._key != call.key:
            raise RpcError(f"another change of {self.name} has taken its place", CONFLICT)
        try:
            if not self._state.prepared(decided=committing):
                return None
        except ValueError:
            self._roll_back()
            raise
        if not committing:
            return RpcReply(call.call)
        self._key = None
        self._requesters.clear()
        self._state.commit()
        self.version = call.version
        return RpcReply(call.call, None, self._state.result())

    def withdraw(self, server: int, key: str | None = None) -> None:
        """An API server sent ABORT of ``key``, or is gone. A change without requesters is rolled back; if it
        has been decided all the same, a COMMIT follows."""
        if self._key is None or key not in (None, self._key):
            return
        self._requesters.discard(server)
        if not self._requesters:
            self._roll_back()

    def forget(self) -> None:
        """Another head decides from here on: roll back, and take any version of its state as a later one."""
        self._roll_back()
        self.version = 0

    def _roll_back(self) -> None:
        if self._key is not None:
            self._key = None
            self._requesters.clear()
            self._state.abort()
