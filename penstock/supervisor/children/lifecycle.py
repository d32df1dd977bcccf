"""Phases of the whole server, above all its shutdown.

STARTING ──all ready──► SERVING ──signal, gave up──► DRAINING ──streams done──► STOPPING ──► ENDED
    │                      └──SIGTERM──► LEAVING ──grace over──►┘                  ▲
    └───────────────────signal, gave up────────────────────────────────────────────┘

LEAVING exists with a drain grace alone: the server serves as before, but tells load balancers that it ends.
"""

from __future__ import annotations

import enum
import logging
import math
import signal

from penstock.exit_codes import EXIT_OK, exit_code_of
from penstock.supervisor.children.actions import AnnounceReady
from penstock.supervisor.children.child_state import (
    EXIT_GRACE_S,
    Child,
    ChildState,
    ChildTable,
    join_names,
)
from penstock.wire.control import SERVER_ROLES, AcceptConnections, AnnounceDrain, Drain, Role, Stop

SIGNAL_DEBOUNCE_S = 0.1
"""Signals closer together than this count as one: the supervisor's parent may pass on a SIGINT that the
terminal has sent to the whole process group already. A closed terminal sends several SIGHUP; those never
hurry a shutdown."""


class Phase(enum.Enum):
    STARTING = enum.auto()
    SERVING = enum.auto()
    LEAVING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class Lifecycle:
    """Leads all children from one phase to the next. ``drained_role`` is the role that has streams to
    finish, ``drain_grace`` the duration of LEAVING."""

    def __init__(
        self, children: ChildTable, drained_role: Role, drain_timeout: float, drain_grace: float = 0.0
    ) -> None:
        self._children = children
        self._drained_role = drained_role
        self._drain_timeout = drain_timeout
        # Engines alone have no load balancer.
        self._drain_grace = drain_grace if drained_role in SERVER_ROLES else 0.0
        self.phase = Phase.STARTING
        self.deadline: float | None = None
        """When LEAVING, DRAINING or STOPPING ends at the latest, and :meth:`tick` has something to do."""
        self._signalled_at = -math.inf
        self._exit_code = EXIT_OK

    @property
    def shutting_down(self) -> bool:
        """Children that exit are not restarted."""
        return self.phase in (Phase.DRAINING, Phase.STOPPING)

    @property
    def serving(self) -> bool:
        """Clients are served, and children that exit are restarted."""
        return self.phase in (Phase.SERVING, Phase.LEAVING)

    @property
    def exit_code(self) -> int | None:
        """None until every child is gone for good."""
        return self._exit_code if self.phase is Phase.ENDED else None

    def all_ready(self) -> None:
        """All children are ready for the first time."""
        self.phase = Phase.SERVING
        self._children.add_action(AnnounceReady())
        for child in self._children.servers(ChildState.READY):
            self.open_server(child)

    def open_server(self, server: Child) -> None:
        """Has a server take connections; called in a phase in which clients are served."""
        self._children.send(server, AcceptConnections())
        if self.phase is Phase.LEAVING:
            self._children.send(server, AnnounceDrain())

    def signalled(self, signum: int, now: float) -> None:
        """The first signal drains, SIGTERM after the grace, which another signal ends. The next one ends
        running streams with an error; the one after it kills."""
        name = signal.Signals(signum).name
        if self.phase is Phase.SERVING and signum == signal.SIGTERM and self._drain_grace > 0:
            text = (
                f"{name}: /ready answers 503 for {self._drain_grace:g} s (--drain-grace), then shutting down"
            )
            self._children.log(logging.INFO, text)
            self._signalled_at = now
            self._leave(now)
        elif self.phase in (Phase.STARTING, Phase.SERVING):
            self._log_shutdown(name)
            self._signalled_at = now
            self.begin_shutdown(EXIT_OK, now)
        elif signum != signal.SIGHUP and now - self._signalled_at >= SIGNAL_DEBOUNCE_S:
            self._signalled_at = now
            if self.phase is Phase.LEAVING:
                self._log_shutdown(name)
                self.begin_shutdown(EXIT_OK, now)
                self.advance(now)
                return
            self._exit_code = self._exit_code or exit_code_of(signum)
            if self.phase is Phase.DRAINING:
                text = f"{name} while shutting down: running streams end with an error"
                self._children.log(logging.WARNING, text)
                self._stop(now)
            else:
                text = f"{name} while stopping: killing what has not ended"
                self._children.log(logging.WARNING, text)
                self._kill_all()
        self.advance(now)

    def begin_shutdown(self, exit_code: int, now: float) -> None:
        """Drain a server that serves, stop one that still starts."""
        self._exit_code = exit_code
        for child in self._children:
            if child.state is ChildState.WAITING:
                child.cancel_restart()
        if self.phase is Phase.STARTING:
            self._stop(now)
            return
        self.phase, self.deadline = Phase.DRAINING, now + self._drain_timeout
        for child in self._children:
            if child.state is ChildState.STARTING:
                self._children.kill(child)
            elif child.alive and child.name.role == self._drained_role:
                self._children.send(child, Drain())

    def advance(self, now: float) -> None:
        """Enter the next phase when the last child that this one waits for has exited."""
        alive = self._children.alive()
        if self.phase is Phase.DRAINING and not any(child.name.role == self._drained_role for child in alive):
            self._stop(now)
        if self.phase is Phase.STOPPING and not alive:
            self.phase, self.deadline = Phase.ENDED, None

    def tick(self, now: float) -> None:
        """End a phase whose deadline has passed."""
        if self.deadline is None or now < self.deadline:
            return
        self.deadline = None
        if self.phase is Phase.LEAVING:
            self._log_shutdown("end of the grace")
            self.begin_shutdown(EXIT_OK, now)
            self.advance(now)
        elif self.phase is Phase.DRAINING:
            waited = f"{self._drain_timeout:g} s (--drain-timeout)"
            self._children.log(logging.WARNING, f"streams still run after {waited}; they end with an error")
            self._stop(now)
        else:
            left = join_names(self._children.alive())
            self._children.log(logging.WARNING, f"killing what has not ended: {left}")
            self._kill_all()

    def _leave(self, now: float) -> None:
        self.phase, self.deadline = Phase.LEAVING, now + self._drain_grace
        for child in self._children.servers(ChildState.READY, ChildState.RETIRING):
            self._children.send(child, AnnounceDrain())

    def _log_shutdown(self, cause: str) -> None:
        draining = self.phase is not Phase.STARTING
        wait = f", finishing running streams for up to {self._drain_timeout:g} s" if draining else ""
        self._children.log(logging.INFO, f"{cause}: shutting down{wait}")

    def _stop(self, now: float) -> None:
        self.phase, self.deadline = Phase.STOPPING, now + EXIT_GRACE_S
        for child in self._children.alive():
            if child.state is ChildState.STARTING:
                self._children.kill(child)  # it has no requests, and reads no messages while it loads
            else:
                self._children.send(child, Stop())

    def _kill_all(self) -> None:
        for child in self._children.alive():
            self._children.kill(child)
