"""The agreed states of all engines, kept by the supervisor because API servers come and go.

The deciding end of the two-phase change in :mod:`penstock.dispatch.two_phase_change`.
"""

from __future__ import annotations

import msgspec

from penstock.supervisor.children.actions import ProcessName
from penstock.wire.control import MAX_STATES, AgreedState, AgreedStates, ProposeState


class AgreedStateStore:
    """Records one change after the other. A recorded change is decided: every API server applies it."""

    def __init__(self, agreed: AgreedStates | None = None) -> None:
        """``agreed``: what is agreed on from the start."""
        self.agreed = agreed or AgreedStates(revision=0, adopted=0, states=[])
        """The message that API servers get; written by this class alone."""
        self._confirmed: dict[ProcessName, int] = {}
        """The revision that each API server has applied."""

    def propose(self, change: ProposeState) -> bool:
        """Records a change and returns True; False: the state has changed since the change was prepared, or
        there are MAX_STATES other states."""
        states = {state.name: state for state in self.agreed.states}
        state = states.get(change.name)
        if (0 if state is None else state.version) != change.base:
            return False
        if state is None and len(states) >= MAX_STATES:
            return False
        revision = self.agreed.revision + 1
        states[change.name] = AgreedState(
            name=change.name, key=change.key, version=revision, arguments=change.arguments
        )
        self.agreed = msgspec.structs.replace(self.agreed, revision=revision, states=list(states.values()))
        return True

    def confirm(self, server: ProcessName, revision: int) -> None:
        """An API server has applied a revision; one that does not exist counts as the latest."""
        self._confirmed[server] = min(revision, self.agreed.revision)

    def forget(self, server: ProcessName) -> None:
        """An API server has exited."""
        self._confirmed.pop(server, None)

    def advance_adopted(self, servers: list[ProcessName]) -> bool:
        """Advances ``adopted`` to the revision that all ``servers``, those that serve, have applied. Returns
        whether that changed it."""
        adopted = min((self._confirmed.get(server, 0) for server in servers), default=0)
        if adopted <= self.agreed.adopted:
            return False
        self.agreed = msgspec.structs.replace(self.agreed, adopted=adopted)
        return True
