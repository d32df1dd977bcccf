"""API servers that serve are replaced one by one.

A new one takes the next free number of the old one's place, and when it is ready the old one is RETIRING,
serving what it has until that ends.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.wire.control import Drain


class RollingRestart:
    """Those still to replace. A number modulo ``places`` is an API server's place; its successor keeps it."""

    def __init__(self, children: ChildTable, places: int) -> None:
        self._children = children
        self._places = places
        self._remaining: deque[ProcessName] = deque()

    @property
    def running(self) -> bool:
        """A new one is starting."""
        return any(child.replaces is not None for child in self._children)

    def start(self, now: float) -> None:
        """All that are ready, one after the other."""
        self._remaining += [child.name for child in self._children.with_role("api-server", ChildState.READY)]
        self._children.log(logging.INFO, f"SIGHUP: replacing {len(self._remaining)} API servers one by one")
        self._replace_next(now)

    def take_over(self, child: Child, now: float) -> None:
        """The new one is ready: the old one ends when it has served what it has."""
        assert child.replaces is not None
        old, child.replaces = self._children[child.replaces], None
        old.state, old.deadline = ChildState.RETIRING, None
        self._children.send(old, Drain(replaced=True))
        self._children.log(logging.INFO, f"{child.name} is ready and replaces {old.name}")
        self._replace_next(now)

    def handle_exit(self, child: Child, now: float) -> bool:
        """Of either half of a replacement; False when it was none."""
        if child.replaces is not None:
            self._children.log(logging.ERROR, f"{child.replaces} goes on; nothing more is replaced")
            self._children.remove(child)
            self._remaining.clear()
            return True
        for new in self._children:
            if new.replaces == child.name:  # it comes just in time
                new.replaces = None
                self._children.remove(child)
                self._replace_next(now)
                return True
        return False

    def _replace_next(self, now: float) -> None:
        while self._remaining:
            old = self._remaining.popleft()
            if self._children[old].state is not ChildState.READY:
                continue  # it died meanwhile: the one that is started again is new anyway
            numbers = (
                ProcessName("api-server", index) for index in count(old.index % self._places, self._places)
            )
            child = Child(next(name for name in numbers if name not in self._children), replaces=old)
            self._children.add(child)
            self._children.spawn(child, now)
            return
