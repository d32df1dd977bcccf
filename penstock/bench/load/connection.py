"""What the load client needs of a connection, whatever its protocol."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.bench.load.latency import ReadLog


class Ended(NamedTuple):
    """A request that has ended. ``error``: what was wrong, or None."""

    request: int
    error: str | None


class Connection(Protocol):
    """The state of one connection, without its socket.

    Bytes to send collect until ``take_output``, which is called after every other method.
    """

    @property
    def places(self) -> int:
        """Requests that it carries at a time."""

    @property
    def ready(self) -> bool:
        """Whether it may carry requests already."""

    @property
    def failure(self) -> str | None:
        """Why it may not carry another request; None if it may."""

    @property
    def running(self) -> int:
        """Requests in flight."""

    @property
    def whole_events(self) -> bool:
        """Whether a read that holds only whole JSON events may be counted without ``feed``."""

    def start(self, request: int) -> int:
        """Start the request of this number. Returns the number of its reads in the log."""

    def feed(self, data: bytes, log: ReadLog) -> list[Ended]:
        """Take what was read, and log the events in it. Returns the requests that ended."""

    def close(self) -> list[Ended]:
        """The server closed the connection. Returns the requests that ended with it."""

    def take_output(self) -> bytes:
        """What is to be sent, once."""
