"""API servers that serve are replaced one by one.

A new one takes the next free number of the old one's place, and when it is ready the old one is RETIRING,
serving what it has until that ends.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count

from penstock.supervisor.actions import Name
from penstock.supervisor.children import Child, Children, State
from penstock.wire.control import Drain


class Replacement:
    """Those still to replace. A number modulo ``places`` is an API server's place; its successor keeps it."""

    def __init__(self, children: Children, places: int) -> None:
        self._children = children
        self._places = places
        self._left: deque[Name] = deque()

    @property
    def running(self) -> bool:
        """A new one is starting."""
        return any(child.replaces is not None for child in self._children)

    def begin(self, now: float) -> None:
        """All that are ready, one after the other."""
        self._left += [child.name for child in self._children.of("api-server", State.READY)]
        self._children.say(logging.INFO, f"SIGHUP: replacing {len(self._left)} API servers one by one")
        self._go_on(now)

    def take_over(self, child: Child, now: float) -> None:
        """The new one is ready: the old one ends when it has served what it has."""
        assert child.replaces is not None
        old, child.replaces = self._children[child.replaces], None
        old.state, old.deadline = State.RETIRING, None
        self._children.send(old, Drain(replaced=True))
        self._children.say(logging.INFO, f"{child.name} is ready and replaces {old.name}")
        self._go_on(now)

    def settle_death(self, child: Child, now: float) -> bool:
        """Of either half of a replacement; False when it was none."""
        if child.replaces is not None:
            self._children.say(logging.ERROR, f"{child.replaces} goes on; nothing more is replaced")
            self._children.remove(child)
            self._left.clear()
            return True
        for new in self._children:
            if new.replaces == child.name:  # it comes just in time
                new.replaces = None
                self._children.remove(child)
                self._go_on(now)
                return True
        return False

    def _go_on(self, now: float) -> None:
        while self._left:
            old = self._left.popleft()
            if self._children[old].state is not State.READY:
                continue  # it died meanwhile: the one that is started again is new anyway
            numbers = (Name("api-server", index) for index in count(old.index % self._places, self._places))
            child = Child(next(name for name in numbers if name not in self._children), replaces=old)
            self._children.add(child)
            self._children.spawn(child, now)
            return
