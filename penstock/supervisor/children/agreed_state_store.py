"""The states that all engines agree on, as the supervisor keeps them for API servers that come and go."""

from __future__ import annotations

import msgspec

from penstock.supervisor.children.actions import ProcessName
from penstock.wire.control import AgreedState, AgreedStates, ProposeState


class AgreedStateStore:
    """Notes one change after the other. What is noted is decided; every API server acts by it."""

    def __init__(self) -> None:
        self._agreed = AgreedStates(revision=0, adopted=0, states=[])
        self._confirmed: dict[ProcessName, int] = {}
        """The revision that each API server acts by."""

    @property
    def agreed(self) -> AgreedStates:
        """What API servers are told."""
        return self._agreed

    def propose(self, change: ProposeState) -> bool:
        """Notes a change, unless the state has changed since it was prepared. Returns whether it is new."""
        states = {state.name: state for state in self._agreed.states}
        state = states.get(change.name)
        if (0 if state is None else state.version) != change.base:
            return False
        revision = self._agreed.revision + 1
        states[change.name] = AgreedState(
            name=change.name, key=change.key, version=revision, arguments=change.arguments
        )
        self._agreed = msgspec.structs.replace(self._agreed, revision=revision, states=list(states.values()))
        return True

    def confirm(self, server: ProcessName, revision: int) -> None:
        """An API server acts by a revision."""
        self._confirmed[server] = revision

    def forget(self, server: ProcessName) -> None:
        """An API server is gone."""
        self._confirmed.pop(server, None)

    def advance_adopted(self, servers: list[ProcessName]) -> bool:
        """Notes which revision all of ``servers``, those that serve, act by. Returns whether that is news."""
        adopted = min((self._confirmed.get(server, 0) for server in servers), default=0)
        if adopted <= self._agreed.adopted:
            return False
        self._agreed = msgspec.structs.replace(self._agreed, adopted=adopted)
        return True
