"""Rolling restart (SIGHUP): API servers, or the workers of a gateway, are replaced one by one.

The new one takes a free number that is the old one's modulo the count of servers. When it is ready, the
old one is RETIRING: it finishes its requests and exits. What is starting when SIGHUP comes has older options:
once it is ready, all are replaced again.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count

from penstock.supervisor.children.actions import NothingReplaced, ProcessName, ReplaceAgain
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.wire.control import Drain


class RollingRestart:
    """The servers still to replace. ``servers`` is how many serve at a time, ``noun`` the word for them."""

    def __init__(self, children: ChildTable, servers: int, noun: str) -> None:
        self._noun = noun
        self._children = children
        self._servers = servers
        self._remaining: deque[ProcessName] = deque()
        self._any_replaced = False
        self._ordered_again = False

    @property
    def running(self) -> bool:
        """A replacement is starting."""
        return any(child.replaces is not None for child in self._children)

    def start_later(self) -> None:
        """Replace all servers once the first start is over."""
        self._ordered_again = True
        text = f"SIGHUP while starting: {self._noun} are replaced after that"
        self._children.log_rarely(logging.WARNING, "SIGHUP", text)

    def start(self, now: float) -> None:
        """Replace all servers that are ready; once more, if one is starting."""
        self._ordered_again = bool(self._children.servers(ChildState.STARTING))
        if self.running:
            text = f"SIGHUP while replacing {self._noun}: they are replaced again after that"
            self._children.log_rarely(logging.WARNING, "SIGHUP", text)
            return
        self._any_replaced = False
        self._remaining += [child.name for child in self._children.servers(ChildState.READY)]
        text = f"SIGHUP: replacing {len(self._remaining)} {self._noun} one by one"
        self._children.log(logging.INFO, text)
        self.replace_next(now)

    def take_over(self, child: Child, now: float) -> None:
        """A replacement is ready: the old server retires."""
        assert child.replaces is not None
        old, child.replaces = self._children[child.replaces], None
        old.retire()
        self._any_replaced = True
        self._children.send(old, Drain(replaced=True))
        self._children.log(logging.INFO, f"{child.name} is ready and replaces {old.name}")
        self.replace_next(now)

    def handle_exit(self, child: Child, now: float) -> bool:
        """The exit of a replacement, or of the server that one is to replace; False: it is neither."""
        if child.replaces is not None:
            self._children.log(logging.ERROR, f"{child.replaces} goes on; the rolling restart ends")
            self._children.remove(child)
            self._remaining.clear()
            if not self._any_replaced:
                self._children.add_action(NothingReplaced())
            self.replace_next(now)
            return True
        for new in self._children:
            if new.replaces == child.name:  # its replacement is starting already
                new.replaces = None
                self._children.remove(child)
                self.replace_next(now)
                return True
        return False

    def replace_next(self, now: float) -> None:
        """Start the next replacement, unless one is starting."""
        if self.running:
            return
        while self._remaining:
            old = self._remaining.popleft()
            if self._children[old].state is not ChildState.READY:
                continue  # it exited meanwhile, and its restart is a new process anyway
            numbers = (
                ProcessName(old.role, index) for index in count(old.index % self._servers, self._servers)
            )
            child = Child(next(name for name in numbers if name not in self._children), replaces=old)
            self._children.add(child)
            self._children.spawn(child, now)
            return
        if self._ordered_again and not self._children.servers(ChildState.STARTING):
            self._ordered_again = False
            self._children.add_action(ReplaceAgain())
