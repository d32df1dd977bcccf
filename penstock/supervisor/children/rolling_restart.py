"""Rolling restart (SIGHUP): API servers are replaced one by one.

The new one takes a free number that is the old one's modulo the count of API servers. When it is ready, the
old one is RETIRING: it finishes its requests and exits.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.wire.control import Drain


class RollingRestart:
    """The API servers still to replace. ``api_servers`` is how many serve at a time."""

    def __init__(self, children: ChildTable, api_servers: int) -> None:
        self._children = children
        self._api_servers = api_servers
        self._remaining: deque[ProcessName] = deque()

    @property
    def running(self) -> bool:
        """A replacement is starting."""
        return any(child.replaces is not None for child in self._children)

    def start(self, now: float) -> None:
        """Replaces all API servers that are ready."""
        self._remaining += [child.name for child in self._children.with_role("api-server", ChildState.READY)]
        self._children.log(logging.INFO, f"SIGHUP: replacing {len(self._remaining)} API servers one by one")
        self._replace_next(now)

    def take_over(self, child: Child, now: float) -> None:
        """A replacement is ready: the old API server retires."""
        assert child.replaces is not None
        old, child.replaces = self._children[child.replaces], None
        old.retire()
        self._children.send(old, Drain(replaced=True))
        self._children.log(logging.INFO, f"{child.name} is ready and replaces {old.name}")
        self._replace_next(now)

    def handle_exit(self, child: Child, now: float) -> bool:
        """The exit of a replacement, or of the API server that one is to replace; False: it is neither."""
        if child.replaces is not None:
            self._children.log(logging.ERROR, f"{child.replaces} goes on; the rolling restart ends")
            self._children.remove(child)
            self._remaining.clear()
            return True
        for new in self._children:
            if new.replaces == child.name:  # its replacement is starting already
                new.replaces = None
                self._children.remove(child)
                self._replace_next(now)
                return True
        return False

    def _replace_next(self, now: float) -> None:
        while self._remaining:
            old = self._remaining.popleft()
            if self._children[old].state is not ChildState.READY:
                continue  # it exited meanwhile, and its restart is a new process anyway
            numbers = (
                ProcessName("api-server", index)
                for index in count(old.index % self._api_servers, self._api_servers)
            )
            child = Child(next(name for name in numbers if name not in self._children), replaces=old)
            self._children.add(child)
            self._children.spawn(child, now)
            return
