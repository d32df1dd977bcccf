"""Tells systemd, or whatever sets NOTIFY_SOCKET, about the state of this process: sd_notify(3)."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import time
from collections.abc import Callable, MutableMapping


class ServiceState(enum.Enum):
    READY = "READY=1"
    RELOADING = "RELOADING=1"
    STOPPING = "STOPPING=1"


class ServiceManager:
    """Sends states when they change, and signs of life while a watchdog waits for them. Without a service
    manager it does nothing; one that does not listen is no error."""

    def __init__(
        self,
        environ: MutableMapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the variables out of ``environ``: they are not for child processes."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = watchdog_us.isdecimal() and pid in ("", str(os.getpid()))
        self._interval_s = int(watchdog_us) / 1e6 / 3 if watched else None
        self._clock = clock
        self._beat_at = clock()
        self._state: ServiceState | None = None
        self._status = ""

    def set_state(self, state: ServiceState) -> None:
        """Send the state if it is another one than before."""
        if state is self._state:
            return
        self._state = state
        lines = [state.value]
        if state is ServiceState.RELOADING:  # Type=notify-reload compares it with the time of its signal
            lines.append(f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        self._send(*lines)

    def set_status(self, status: str) -> None:
        """Send a line for people, as ``systemctl status`` shows it, if it is another one than before."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status.splitlines()[0] if status else ''}")

    def beat(self) -> None:
        """Called often, by the loop that must not hang."""
        if self._interval_s is not None and self._clock() >= self._beat_at:
            self._beat_at = self._clock() + self._interval_s
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        # A leading @ stands for the zero byte of an abstract name.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), address)
