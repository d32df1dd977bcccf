"""What follows an exit that nobody asked for: a restart, or the end of the server.

Engines of an expert-parallel group compute every step together: when one exits, the others are killed, and
all are restarted together.
"""

from __future__ import annotations

import logging

from penstock.exit_codes import EXIT_FAILED, EXIT_USAGE
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable, ExitCause, join_names
from penstock.supervisor.children.lifecycle import Lifecycle, Phase
from penstock.supervisor.children.restart_policy import MAX_MEDIA_DELAY_S, RestartPolicy
from penstock.wire.control import Role

_DISPENSABLE: tuple[Role, ...] = ("coordinator", "media-worker")
"""Roles without which a server serves: text, for instance."""


class Recovery:
    """Restarts children. ``expert_parallel``: the engines are one group."""

    def __init__(self, children: ChildTable, lifecycle: Lifecycle, *, expert_parallel: bool) -> None:
        self._children = children
        self._lifecycle = lifecycle
        self._group = [child for child in children if expert_parallel and child.name.role == "engine"]
        """Engines of the group, which share a restart policy; empty without a group."""
        for child in self._group:
            child.policy = self._group[0].policy
        for child in children:
            if child.name.role == "media-worker":
                child.policy = RestartPolicy(MAX_MEDIA_DELAY_S)

    def on_ready(self, child: Child, now: float) -> None:
        """The start was a success; that of a group when all its engines are ready."""
        if child not in self._group or all(other.state is ChildState.READY for other in self._group):
            child.policy.on_ready(now)

    def in_group(self, child: Child) -> bool:
        return child in self._group

    def group_peers(self, child: Child) -> list[Child]:
        """The other living engines of its group; empty for a child without a group."""
        return [other for other in self._group if self.in_group(child) and other is not child and other.alive]

    def restart_group(self, child: Child, cause: str, now: float) -> None:
        """Kill the peers of a group's engine that has exited; restart the group once all have exited."""
        left = self.group_peers(child)
        if child.exit_cause is not ExitCause.KILLED_WITH_GROUP:
            self._children.log(logging.ERROR, f"{child.name} {cause}")
            peers = [other for other in left if not other.killed]
            if peers:
                text = f"killing the other engines of its group: {join_names(peers)}"
                self._children.log(logging.INFO, text)
            for other in peers:
                self._children.kill(other, ExitCause.KILLED_WITH_GROUP)
        if not left:
            self.restart_or_give_up(self._group, now)

    def restart_or_give_up(self, gone: list[Child], now: float) -> None:
        """Schedule the restart of one child, or of all engines of the group.

        They are given up when they would fail the same way again, or when none of their role is left that
        does not keep failing; before the first service when they keep failing."""
        # An engine that is killed with its group last reported that the others had left.
        fatal = any(
            child.failure is not None
            and child.failure.fatal
            and child.exit_cause is not ExitCause.KILLED_WITH_GROUP
            for child in gone
        )
        # A first start that the system refuses is given up like any other.
        started = self._lifecycle.phase is Phase.STARTING or all(child.started for child in gone)
        delay = gone[0].policy.next_delay(now, started=started)
        name = join_names(gone) if len(gone) == 1 else f"the group of {join_names(gone)}"
        role = gone[0].name.role
        others = self._children.with_role(role, ChildState.WAITING, ChildState.STARTING, ChildState.READY)
        if not fatal:  # those that fail as often as these serve nobody
            others = [child for child in others if not child.policy.keeps_failing]
        goes_on = self._lifecycle.serving and (bool(others) or role in _DISPENSABLE)
        serving = [child for child in others if child.state is ChildState.READY]
        rest = f" with {join_names(serving)}" if serving else ""
        keeps_failing = gone[0].policy.keeps_failing
        if not fatal and (goes_on or not keeps_failing):
            if keeps_failing:
                waits = bool(others) and not serving
                what = f"{join_names(others)} may start yet" if waits else f"serving goes on{rest}"
                self._children.log(logging.ERROR, f"{name} keeps failing to start; {what}")
            self._children.log(logging.INFO, f"{name} is started again in {delay:g} s")
            for child in gone:
                child.schedule_restart(now + delay)
            return
        if not fatal:
            self._children.log(logging.ERROR, f"{name} keeps failing to start; giving up")
        if goes_on:
            self._children.log(logging.ERROR, f"serving goes on without {name}{rest and ','}{rest}")
        else:
            usage = any(child.failure is not None and child.failure.usage for child in gone)
            self._lifecycle.begin_shutdown(EXIT_USAGE if usage else EXIT_FAILED, now)
