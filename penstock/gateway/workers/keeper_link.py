"""A worker's end of the letters that it exchanges with the keeper and, through it, with the other workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Mapping

import msgspec

from penstock.gateway.workers.letters import Letter, LetterStream, WorkerName

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait of a worker that ends until its last letters are sent."""
HELLO, MEMBERS = "hello", "members"


class Members(msgspec.Struct, array_like=True, frozen=True):
    """The workers that run, as the keeper tells them after each change."""

    present: list[WorkerName]
    first_epochs: dict[int, int]
    """First epoch that lives, or may come, by number of a worker: earlier ones have ended."""


_decode_members = msgspec.msgpack.Decoder(Members).decode
Handler = Callable[[WorkerName | None, bytes], None]
"""Called with the worker that has sent a letter, None for the keeper, and its data."""


class KeeperLink:
    """One worker's end, from :meth:`open` to :meth:`close`. ``gateway`` is a name that no other gateway has.

    What it sends may be dropped if the other end does not read for long. A link that breaks leaves the worker
    as one without others, and without a keeper.
    """

    def __init__(self, sock: socket.socket, own: WorkerName, gateway: str) -> None:
        self.own = own
        self.gateway = gateway
        self.siblings: frozenset[WorkerName] = frozenset()
        """The other workers that run."""
        self.first_epochs: Mapping[int, int] = {own.number: own.epoch}
        """See :attr:`Members.first_epochs`."""
        self.on_joined: list[Callable[[WorkerName], None]] = []
        self.on_gone: list[Callable[[WorkerName], None]] = []
        self._socket = sock
        self._stream: LetterStream | None = None
        """None: the link is not open."""
        self._ended = asyncio.Event()
        self._handlers: dict[str, Handler] = {MEMBERS: self._on_members}

    @property
    def instance(self) -> str:
        """A name that no other worker of any gateway has."""
        return f"gateway-{self.own}-{self.gateway}"

    async def open(self) -> None:
        """Take letters from here on, and be known to the others."""
        loop = asyncio.get_running_loop()
        _, self._stream = await loop.create_unix_connection(
            lambda: LetterStream(self._on_letter, self._on_end), sock=self._socket
        )
        self.ask_keeper(HELLO, b"")

    async def close(self) -> None:
        """Send what is unsent, and end the link."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.transport.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), CLOSE_S)

    def on(self, topic: str, handler: Handler) -> None:
        """Call ``handler`` with each letter of this topic."""
        self._handlers[topic] = handler

    def ask_keeper(self, topic: str, data: bytes) -> bool:
        """Send a letter to the keeper. Returns False for one that is dropped."""
        return self._stream is not None and self._stream.send(Letter(topic, data))

    def tell_others(self, topic: str, data: bytes, to: WorkerName | None = None) -> bool:
        """Send a letter to the other workers, or to one of them. Returns False for one that is dropped."""
        return not self.siblings or (self._stream is not None and self._stream.send(Letter(topic, data, to)))

    def _on_letter(self, letter: Letter) -> None:
        if (handler := self._handlers.get(letter.topic)) is not None:
            handler(letter.peer, letter.data)

    def _on_end(self) -> None:
        if self._stream is not None:
            log.error("the keeper of what the workers share cannot be reached")
        self._stream = None
        self._ended.set()
        self._set_siblings(())

    def _on_members(self, caller: WorkerName | None, data: bytes) -> None:
        members = _decode_members(data)
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
