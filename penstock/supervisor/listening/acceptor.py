"""Accepts connections and hands each to the API server with the fewest connections.

When several API servers accept from one listening socket, the first to wake up gets the connection, and on
some machines one of them gets nearly all. Here one thread accepts all of them, so that they are spread
evenly.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Self

from penstock.http.sockets.accepting import RETRY_S, accept_waiting
from penstock.http.sockets.descriptors import descriptors_left
from penstock.supervisor.listening.least_connections import LeastConnectionsBalancer
from penstock.wire.handover import HandoverError, HandoverSender

log = logging.getLogger(__name__)

MAX_ACCEPTS_PER_TURN = 32
"""Connections accepted before reports are read again."""
_RESERVED_DESCRIPTORS = 32
"""Descriptors for the children. The others bound the connections in transit: all can be taken back."""


class ConnectionTarget:
    """An API server that connections go to, from before its start until after its exit."""

    def __init__(self, name: str, post: Callable[[ConnectionTarget, bool], None]) -> None:
        self.name = name
        self.sender = HandoverSender()
        self._post = post
        post(self, True)

    def remove(self) -> None:
        """The API server has exited: connections that it has not taken go to others. To be called once."""
        self._post(self, False)


class Acceptor:
    """A thread that accepts from a listening socket, which it does not own. Use it as a context.

    A separate thread, because the supervisor's main thread may block while it starts processes or writes to
    the log. It never waits for an API server: one whose socket is full is skipped, and while all are,
    connections wait in the listener's backlog.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._balancer: LeastConnectionsBalancer[ConnectionTarget] = LeastConnectionsBalancer(
            max_in_transit=max(1, descriptors_left() - _RESERVED_DESCRIPTORS)
        )
        self._changes: deque[tuple[ConnectionTarget, bool]] = deque()
        """Targets added (True) and removed by the main thread, which then writes a byte to the socket."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._alive, self.failure = socket.socketpair()
        """``failure`` becomes readable when the thread has failed."""
        self._waiting: deque[socket.socket] = deque()
        """Accepted connections that no API server could get yet."""
        self._listener_registered = False
        self._opened = False
        """Whether all API servers have taken connections."""
        self._resume_at: float | None = None
        """When accepting goes on after the system was exhausted."""
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="acceptor", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._wake_up()
        self._thread.join()
        self._apply_changes()  # targets removed at last
        for connection in self._waiting:
            connection.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._alive.close()
        self.failure.close()

    def add_target(self, name: str) -> ConnectionTarget:
        """Add an API server that is about to start; ``name`` is for the log."""
        return ConnectionTarget(name, self._post)

    def _post(self, target: ConnectionTarget, added: bool) -> None:
        self._changes.append((target, added))
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of bytes that wake it up
            self._wake.send(b"x")

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                self._run_once()
        except Exception:
            log.exception("connections cannot be accepted any more: shutting down")
            self._alive.close()

    def _run_once(self) -> None:
        self._apply_changes()
        self._hand_over()
        self._update_listener_registration(time.monotonic())
        ready = [key.data for key, _ in self._selector.select(self._timeout(time.monotonic()))]
        for handle in sorted(ready, key=self._is_last):
            handle()
        for target in self._balancer.stalled(time.monotonic()):
            log.warning("%s takes no connections: others get those that wait for it", target.name)
            self._take_back(target)
            target.sender.request_report()

    def _is_last(self, handle: Callable[[], None]) -> bool:
        """Reports are read first: they count connections that closed before the next one came."""
        return handle == self._accept

    def _timeout(self, now: float) -> float | None:
        times = [each for each in (self._balancer.next_stall(), self._resume_at) if each is not None]
        return max(0.0, min(times) - now) if times else None

    def _update_listener_registration(self, now: float) -> None:
        """Poll the listener only while an API server takes connections; at first, only once all do, because
        the first one would get all connections of a burst."""
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
        self._opened = self._opened or self._balancer.all_accept()
        wanted = (
            self._opened
            and self._resume_at is None
            and not self._waiting
            and self._balancer.choose() is not None
        )
        if wanted and not self._listener_registered:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listener_registered and not wanted:
            self._selector.unregister(self._listener)
        self._listener_registered = wanted

    def _accept(self) -> None:
        for connection in accept_waiting(self._listener, MAX_ACCEPTS_PER_TURN, self._pause):
            self._waiting.append(connection)
            self._hand_over()
            if self._waiting:
                return

    def _pause(self) -> None:
        self._resume_at = time.monotonic() + RETRY_S

    def _hand_over(self) -> None:
        while self._waiting and (target := self._balancer.choose()) is not None:
            if target.sender.send(self._waiting[0]):
                self._balancer.connection_sent(target, time.monotonic())
                self._waiting.popleft().close()
            else:
                self._balancer.connection_refused(target, time.monotonic())

    def _take_back(self, target: ConnectionTarget) -> None:
        count, connections = target.sender.reclaim()
        self._waiting.extend(connections)
        self._balancer.connections_taken_back(target, count)

    def _apply_changes(self) -> None:
        while self._changes:
            target, added = self._changes.popleft()
            if added:
                self._balancer.add_server(target)
                self._selector.register(target.sender, selectors.EVENT_READ, partial(self._on_report, target))
            else:
                self._take_back(target)
                self._balancer.remove(target)
                with contextlib.suppress(KeyError):  # what it reported was nonsense
                    self._selector.unregister(target.sender)
                target.sender.close()

    def _on_wake(self) -> None:
        self._woken.recv(4096)

    def _on_report(self, target: ConnectionTarget) -> None:
        try:
            report = target.sender.report()
            if report is not None:
                self._balancer.on_report(target, report, time.monotonic())
        except (HandoverError, OSError) as error:
            log.error("%s gets no more connections: %s", target.name, error)
            self._selector.unregister(target.sender)
            self._balancer.exclude(target)
            self._take_back(target)
            return
        if report is not None and not report.accepts:
            self._take_back(target)
