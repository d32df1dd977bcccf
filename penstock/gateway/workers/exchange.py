"""Datagrams among the workers of a gateway: each has a socket in the run directory.

Nothing waits for anybody: a datagram for which a sibling has no room is lost, and so is one for a sibling
that has died, whose socket is removed. What is sent has to bear that: states as a whole, again and again, or
hints.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_complain = RateLimitedLog(log)

MAX_DATAGRAM_BYTES = 128 << 10
"""The system's default takes 200 KB."""
MAX_READ_AT_ONCE = 64
"""Datagrams that are read per turn of the event loop."""
_SOCKET = re.compile(r"worker-([0-9]{1,9})\.([0-9]{1,9})")


class WorkerName(NamedTuple):
    """A worker: its number, and how many had the number before."""

    number: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.number}.{self.epoch}"


class _Datagram(msgspec.Struct, array_like=True, frozen=True):
    sender: WorkerName
    topic: str
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Datagram)

Handler = Callable[[WorkerName, bytes], None]


class Exchange:
    """One worker's end, from :meth:`open` to :meth:`close`."""

    def __init__(self, run_dir: str, own: WorkerName) -> None:
        self.own = own
        self.run_dir = run_dir
        self.siblings: set[WorkerName] = set()
        """The other workers, as far as they are known."""
        self.on_joined: list[Callable[[WorkerName], None]] = []
        self.on_gone: list[Callable[[WorkerName], None]] = []
        self._ended: dict[int, int] = {}
        """The latest epoch that has ended by the number of a worker."""
        self._directory = Path(run_dir)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._handlers: dict[str, Handler] = {"hello": lambda sender, data: None}

    def open(self) -> None:
        """Takes datagrams from here on, and says so to the siblings."""
        self._socket.bind(self._path(self.own))
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_readable)
        self.look()
        self.send("hello", b"")

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path(self.own))

    def on(self, topic: str, handler: Handler) -> None:
        """Calls ``handler`` with the sender and the data of each datagram of this topic."""
        self._handlers[topic] = handler

    def send(self, topic: str, data: bytes, to: WorkerName | None = None) -> bool:
        """Sends to one sibling, or to all. Returns whether nothing was lost for want of room."""
        if not self.siblings:
            return True
        taken = True
        datagram = _encode(_Datagram(self.own, topic, data))
        if len(datagram) > MAX_DATAGRAM_BYTES:
            _complain(topic, "%d bytes of %s are too many for the other workers", len(datagram), topic)
            return True
        for sibling in list(self.siblings) if to is None else [to]:
            try:
                self._socket.sendto(datagram, self._path(sibling))
            except (FileNotFoundError, ConnectionRefusedError):
                self._remove(sibling)
            except OSError:  # no room
                taken = False
        return taken

    def first_epochs(self) -> dict[int, int]:
        """Of each number of a worker the first epoch that lives, or may come: earlier ones have ended."""
        found = {number: epoch + 1 for number, epoch in self._ended.items()}
        for each in sorted((self.own, *self.siblings), reverse=True):
            found[each.number] = each.epoch
        return found

    def look(self) -> None:
        """Finds siblings that have come or gone; called about once a second."""
        with contextlib.suppress(OSError):
            found = {
                WorkerName(int(match[1]), int(match[2]))
                for name in os.listdir(self._directory)
                if (match := _SOCKET.fullmatch(name)) is not None
            }
            if gone := self.siblings - found:
                self._on_readable()  # the last that they have sent
            for sibling in gone:
                self._forget(sibling)
            for sibling in found - self.siblings - {self.own}:
                self._add(sibling)

    def _add(self, sibling: WorkerName) -> None:
        self.siblings.add(sibling)
        for joined in self.on_joined:
            joined(sibling)

    def _remove(self, sibling: WorkerName) -> None:
        """The sibling died without removing its socket."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(sibling))
        self._forget(sibling)

    def _forget(self, sibling: WorkerName) -> None:
        if sibling in self.siblings:
            self.siblings.discard(sibling)
            self._ended[sibling.number] = max(sibling.epoch, self._ended.get(sibling.number, 0))
            for gone in self.on_gone:
                gone(sibling)

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_READ_AT_ONCE):
                self._receive(self._socket.recv(MAX_DATAGRAM_BYTES))

    def _receive(self, data: bytes) -> None:
        try:
            datagram = _decoder.decode(data)
            if datagram.sender not in self.siblings:
                self._add(datagram.sender)
            if (handler := self._handlers.get(datagram.topic)) is not None:
                handler(datagram.sender, datagram.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # of another version
            _complain("datagram", "a datagram of another worker was not understood: %s", error)

    def _path(self, name: WorkerName) -> str:
        return str(self._directory / f"worker-{name}")
