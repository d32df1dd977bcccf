"""A worker's end of the letters that it exchanges with the keeper and, through it, with the other workers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping

import msgspec

from penstock.gateway.workers.letters import Letter, LetterStream, StreamEnded, WorkerName
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_complain = RateLimitedLog(log)

CLOSE_S = 2.0
"""Longest wait of a worker that ends until its last letters are sent."""
HELLO, MEMBERS = "hello", "members"


class Members(msgspec.Struct, array_like=True, frozen=True):
    """The workers that run, as the keeper tells them after each change."""

    present: list[WorkerName]
    first_epochs: dict[int, int]
    """Of each number of a worker the first epoch that lives, or may come: earlier ones have ended."""


decode_members = msgspec.msgpack.Decoder(Members).decode
Handler = Callable[[WorkerName | None, bytes], None]
"""Called with the worker that has sent a letter, None for the keeper, and its data."""


class KeeperLink:
    """One worker's end, from :meth:`open` to :meth:`close`.

    What it sends may be dropped if the other end does not read for long. A link that breaks leaves the worker
    as one without others, and without a keeper.
    """

    def __init__(self, sock: socket.socket, own: WorkerName) -> None:
        self.own = own
        self.siblings: frozenset[WorkerName] = frozenset()
        """The other workers that run."""
        self.first_epochs: Mapping[int, int] = {own.number: own.epoch}
        """See :attr:`Members.first_epochs`."""
        self.on_joined: list[Callable[[WorkerName], None]] = []
        self.on_gone: list[Callable[[WorkerName], None]] = []
        self._stream = LetterStream(sock)
        self._is_open = False
        self._handlers: dict[str, Handler] = {MEMBERS: self._on_members}

    def open(self) -> None:
        """Take letters from here on, and be known to the others."""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._stream.fileno(), self._on_readable)
        self.ask_keeper(HELLO, b"")

    def close(self) -> None:
        """Send what is unsent, and end the link."""
        self._end(CLOSE_S)

    def on(self, topic: str, handler: Handler) -> None:
        """Call ``handler`` with each letter of this topic."""
        self._handlers[topic] = handler

    def ask_keeper(self, topic: str, data: bytes) -> bool:
        """Send a letter to the keeper. Returns False for one that is dropped."""
        return self._send(Letter(topic, data))

    def tell_others(self, topic: str, data: bytes, to: WorkerName | None = None) -> bool:
        """Send a letter to the other workers, or to one of them. Returns False for one that is dropped."""
        return not self.siblings or self._send(Letter(topic, data, to))

    def _send(self, letter: Letter) -> bool:
        if not self._is_open or not self._stream.send(letter):
            return False
        if self._stream.has_unsent:
            asyncio.get_running_loop().add_writer(self._stream.fileno(), self._on_writable)
        return True

    def _on_writable(self) -> None:
        self._stream.flush()
        if not self._stream.has_unsent:
            asyncio.get_running_loop().remove_writer(self._stream.fileno())

    def _on_readable(self) -> None:
        try:
            letters = self._stream.receive()
        except StreamEnded as error:
            log.error("the keeper of what the workers share cannot be reached: %s", error)
            self._end(0.0)
            self._set_siblings(())
            return
        for letter in letters:
            if (handler := self._handlers.get(letter.topic)) is not None:
                try:
                    handler(letter.peer, letter.data)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # of another version
                    _complain(letter.topic, "what %s tells is not understood: %s", letter.peer, error)

    def _end(self, wait_s: float) -> None:
        if self._is_open:
            self._is_open = False
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._stream.fileno())
            loop.remove_writer(self._stream.fileno())
        self._stream.close(wait_s)

    def _on_members(self, sender: WorkerName | None, data: bytes) -> None:
        members = decode_members(data)
        self.first_epochs = members.first_epochs
        self._set_siblings(members.present)

    def _set_siblings(self, present: Iterable[WorkerName]) -> None:
        before, self.siblings = self.siblings, frozenset(present) - {self.own}
        for worker in sorted(before - self.siblings):
            for gone in self.on_gone:
                gone(worker)
        for worker in sorted(self.siblings - before):
            for joined in self.on_joined:
                joined(worker)
