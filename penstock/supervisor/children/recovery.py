"""What follows a death that nobody asked for: another start, or giving up.

Engines in lock-step stand and fall together: when one dies, the others are killed, and all are started again.
"""

from __future__ import annotations

import logging

from penstock.exit_codes import EXIT_FAILED
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.supervisor.children.lifecycle import Lifecycle, Phase


class Recovery:
    """Starts children again. ``lockstep``: engines run in lock-step."""

    def __init__(self, children: ChildTable, phases: Lifecycle, *, lockstep: bool) -> None:
        self._children = children
        self._lifecycle = phases
        # Engines in lock-step, which share a policy; none otherwise.
        self._group = [child for child in children if lockstep and child.name.role == "engine"]
        for child in self._group:
            child.policy = self._group[0].policy

    def ready(self, child: Child, now: float) -> None:
        """The start was a success; of engines in lock-step, when it is that of all."""
        if child not in self._group or all(other.state is ChildState.READY for other in self._group):
            child.policy.ready(now)

    def in_group(self, child: Child) -> bool:
        """It is one of the engines in lock-step."""
        return child in self._group

    def group_peers(self, child: Child) -> list[Child]:
        """Those that live and run in lock-step with it."""
        return [other for other in self._group if self.in_group(child) and other is not child and other.alive]

    def restart_group(self, child: Child, cause: str, now: float) -> None:
        """Ends the engines in lock-step with one that died, then settles what follows for all of them."""
        left = self.group_peers(child)
        if not child.killed_with_group:
            self._children.log(logging.ERROR, f"{child.name} {cause}")
            fellows = [other for other in left if not other.killed]
            if fellows:
                told = f"killing what runs in lock-step with it: {join_names(fellows)}"
                self._children.log(logging.INFO, told)
            for other in fellows:
                other.killed_with_group = True
                self._children.kill(other)
        if not left:
            self.restart_or_give_up(self._group, now)

    def restart_or_give_up(self, gone: list[Child], now: float) -> None:
        """Settles what follows for one child, or for all engines in lock-step."""
        # What a killed one complained of last was that the others had left.
        fatal = any(
            child.failure is not None and child.failure.fatal and not child.killed_with_group
            for child in gone
        )
        delay = None if fatal else gone[0].policy.next_delay(now)
        name = join_names(gone) if len(gone) == 1 else f"the group of {join_names(gone)}"
        if delay is not None:
            self._children.log(logging.INFO, f"{name} is started again in {delay:g} s")
            for child in gone:
                child.state, child.deadline = ChildState.WAITING, now + delay
            return
        if not fatal:
            self._children.log(logging.ERROR, f"{name} keeps failing to start; giving up")
        role = gone[0].name.role
        others = self._children.with_role(role, ChildState.WAITING, ChildState.STARTING, ChildState.READY)
        if self._lifecycle.current is Phase.SERVING and (others or role == "coordinator"):
            rest = f", with {join_names(others)}" if others else ""
            self._children.log(logging.ERROR, f"serving goes on without {name}{rest}")
        else:
            self._lifecycle.begin_shutdown(EXIT_FAILED, now)


def join_names(children: list[Child]) -> str:
    """Their names."""
    return ", ".join(str(child.name) for child in children)
