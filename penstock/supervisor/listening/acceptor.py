"""Accepts connections and hands each to the API server that has the fewest.

Where several API servers share one listening socket, the one that wakes first takes a connection, and on some
machines one takes nearly all. Here one thread takes all of them, so that the spread is even.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from penstock.supervisor.listening.least_connections import LeastConnectionsBalancer
from penstock.wire.handover import HandoverSender

log = logging.getLogger(__name__)

ACCEPTED_PER_TURN = 32
"""Connections accepted before reports are read again."""
RETRY_S = 1.0
"""Pause after the system had no descriptor or memory for another connection."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionTarget:
    """One API server's place at the acceptor, from before its start until after its death."""

    def __init__(self, name: str, post: Callable[[ConnectionTarget, bool], None]) -> None:
        self.name = name
        self.giver = HandoverSender()
        self._post = post
        post(self, True)

    def remove(self) -> None:
        """The API server is dead: what it has not taken goes to others. To be called once."""
        self._post(self, False)


class Acceptor:
    """A thread with a listening socket, which it does not own. Use it as a context.

    A thread of its own, because the supervisor's main thread starts processes and writes to a log that may
    block. It never waits for an API server: one without room is passed over, and while there is none for any,
    connections wait in the listener's backlog.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._balancer: LeastConnectionsBalancer[ConnectionTarget] = LeastConnectionsBalancer()
        # Seats taken and left, by the main thread; a byte on the socket says that there are some.
        self._changes: deque[tuple[ConnectionTarget, bool]] = deque()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        # Connections that nobody could be given yet.
        self._waiting: deque[socket.socket] = deque()
        self._listener_registered = False
        # When accepting goes on after the system was exhausted.
        self._resume_at: float | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="acceptor", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending = True
        self._wake.send(b"x")
        self._thread.join()
        self._apply_changes()  # seats that were left at last
        for connection in self._waiting:
            connection.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def add_target(self, name: str) -> ConnectionTarget:
        """For an API server that is about to start; ``name`` is for the log."""
        return ConnectionTarget(name, self._post)

    def _post(self, seat: ConnectionTarget, joins: bool) -> None:
        self._changes.append((seat, joins))
        self._wake.send(b"x")

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                self._run_once()
        except Exception:
            log.exception("connections cannot be accepted any more: shutting down")
            os.kill(os.getpid(), signal.SIGTERM)

    def _run_once(self) -> None:
        self._apply_changes()
        self._hand_over()
        self._update_listener_registration(time.monotonic())
        ready = [key.data for key, _ in self._selector.select(self._timeout(time.monotonic()))]
        for handle in sorted(ready, key=self._is_last):
            handle()
        for seat in self._balancer.stalled(time.monotonic()):
            log.warning("%s takes no connections: others get those that wait for it", seat.name)
            self._take_back(seat)
            seat.giver.request_report()

    def _is_last(self, handle: Callable[[], None]) -> bool:
        """Reports are read first: they tell what closed before a connection came."""
        return handle == self._accept

    def _timeout(self, now: float) -> float | None:
        times = [each for each in (self._balancer.next_stall(), self._resume_at) if each is not None]
        return max(0.0, min(times) - now) if times else None

    def _update_listener_registration(self, now: float) -> None:
        """Poll the listener while there is somebody to give connections to."""
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
        wanted = self._resume_at is None and not self._waiting and self._balancer.choose() is not None
        if wanted and not self._listener_registered:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listener_registered and not wanted:
            self._selector.unregister(self._listener)
        self._listener_registered = wanted

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    log.error("cannot accept connections: %s; trying again", os.strerror(error.errno or 0))
                    self._resume_at = time.monotonic() + RETRY_S
                    return
                continue  # this connection is broken already, see accept(2)
            self._waiting.append(connection)
            self._hand_over()
            if self._waiting:
                return

    def _hand_over(self) -> None:
        while self._waiting and (seat := self._balancer.choose()) is not None:
            if seat.giver.send(self._waiting[0]):
                self._balancer.connection_sent(seat, time.monotonic())
                self._waiting.popleft().close()
            else:
                self._balancer.connection_refused(seat, time.monotonic())

    def _take_back(self, seat: ConnectionTarget) -> None:
        count, connections = seat.giver.reclaim()
        self._waiting.extend(connections)
        self._balancer.connections_taken_back(seat, count)

    def _apply_changes(self) -> None:
        while self._changes:
            seat, joins = self._changes.popleft()
            if joins:
                self._balancer.add(seat)
                self._selector.register(seat.giver, selectors.EVENT_READ, partial(self._on_report, seat))
            else:
                self._take_back(seat)
                self._balancer.remove(seat)
                self._selector.unregister(seat.giver)
                seat.giver.close()

    def _on_wake(self) -> None:
        self._woken.recv(4096)

    def _on_report(self, seat: ConnectionTarget) -> None:
        report = seat.giver.report()
        if report is not None:
            self._balancer.on_report(seat, report, time.monotonic())
            if not report.accepts:
                self._take_back(seat)
