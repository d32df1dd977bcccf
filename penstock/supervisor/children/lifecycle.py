"""The phases of a fleet, above all how it ends.

STARTING ──all ready──► SERVING ──signal, gave up──► DRAINING ──streams done──► STOPPING ──► ENDED
    └───────────────────signal, gave up────────────────────────────────────────────►┘
"""

from __future__ import annotations

import enum
import logging
import math
import signal

from penstock.exit_codes import EXIT_OK, exit_code_of
from penstock.supervisor.children.actions import AnnounceReady
from penstock.supervisor.children.child_state import EXIT_GRACE_S, ChildState, ChildTable
from penstock.wire.control import Drain, Role, Stop

SIGNAL_DEBOUNCE_S = 0.1
"""Signals closer together than this are one: what starts the supervisor may pass on a SIGINT that the
terminal has sent to the whole group already. A closed terminal sends several SIGHUP; they never hurry."""


class Phase(enum.Enum):
    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class Lifecycle:
    """Leads all children from one phase to the next. ``drained`` is the role that has streams to finish."""

    def __init__(self, children: ChildTable, drained: Role, drain_timeout: float) -> None:
        self._children = children
        self._drained_role = drained
        self._drain_timeout = drain_timeout
        self._current = Phase.STARTING
        self._signalled_at = -math.inf
        self._exit_code = EXIT_OK
        # End of DRAINING or STOPPING.
        self._deadline: float | None = None

    @property
    def current(self) -> Phase:
        return self._current

    @property
    def ending(self) -> bool:
        """No child that ends is started again."""
        return self._current in (Phase.DRAINING, Phase.STOPPING)

    @property
    def exit_code(self) -> int | None:
        """None until every child is gone for good."""
        return self._exit_code if self._current is Phase.ENDED else None

    @property
    def deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return self._deadline

    def all_ready(self) -> None:
        """All are ready for the first time."""
        self._current = Phase.SERVING
        self._children.add_action(AnnounceReady())

    def signalled(self, signum: int, now: float) -> None:
        """The first signal drains; the next one ends running streams with an error, one more kills."""
        name = signal.Signals(signum).name
        if self._current in (Phase.STARTING, Phase.SERVING):
            draining = self._current is Phase.SERVING
            wait = f", finishing running streams for up to {self._drain_timeout:g} s" if draining else ""
            self._children.log(logging.INFO, f"{name}: shutting down{wait}")
            self._signalled_at = now
            self.begin_shutdown(EXIT_OK, now)
        elif signum != signal.SIGHUP and now - self._signalled_at >= SIGNAL_DEBOUNCE_S:
            self._signalled_at = now
            self._exit_code = self._exit_code or exit_code_of(signum)
            if self._current is Phase.DRAINING:
                told = f"{name} while shutting down: running streams end with an error"
                self._children.log(logging.WARNING, told)
                self._stop(now)
            else:
                told = f"{name} while stopping: killing what has not ended"
                self._children.log(logging.WARNING, told)
                self._kill_all()
        self.advance(now)

    def begin_shutdown(self, exit_code: int, now: float) -> None:
        """Begins the end: running streams may finish, if there can be any."""
        self._exit_code = exit_code
        for child in self._children:
            if child.state is ChildState.WAITING:
                child.state, child.deadline = ChildState.GONE, None
        if self._current is Phase.STARTING:
            self._stop(now)
            return
        self._current, self._deadline = Phase.DRAINING, now + self._drain_timeout
        for child in self._children:
            if child.state is ChildState.STARTING:
                self._children.kill(child)
            elif child.alive and child.name.role == self._drained_role:
                self._children.send(child, Drain())

    def advance(self, now: float) -> None:
        """To the next phase, when the last child that this one waits for is gone."""
        alive = self._children.alive()
        if self._current is Phase.DRAINING and not any(
            child.name.role == self._drained_role for child in alive
        ):
            self._stop(now)
        if self._current is Phase.STOPPING and not alive:
            self._current, self._deadline = Phase.ENDED, None

    def tick(self, now: float) -> None:
        """Ends a phase that has taken its time."""
        if self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if self._current is Phase.DRAINING:
            waited = f"{self._drain_timeout:g} s (--drain-timeout)"
            self._children.log(logging.WARNING, f"streams still run after {waited}; they end with an error")
            self._stop(now)
        else:
            left = ", ".join(str(child.name) for child in self._children.alive())
            self._children.log(logging.WARNING, f"killing what has not ended: {left}")
            self._kill_all()

    def _stop(self, now: float) -> None:
        self._current, self._deadline = Phase.STOPPING, now + EXIT_GRACE_S
        for child in self._children.alive():
            if child.state is ChildState.STARTING:
                self._children.kill(child)  # it has nothing to finish, and does not listen while it loads
            else:
                self._children.send(child, Stop())

    def _kill_all(self) -> None:
        for child in self._children.alive():
            self._children.kill(child)
