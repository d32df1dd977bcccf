"""Endpoints that an administrator has drained: the keeper knows them, and every worker sends them nothing.

A change is done once all workers have taken it. A mark belongs to an endpoint: when that leaves the pool, as
the address of another server that comes later may be the same, the mark goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from itertools import count

import msgspec

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import Letter, WorkerName
from penstock.gateway.workers.shared_controls import TIMEOUT_S, KeeperSilent

MAX_DRAINED = 4096
"""Endpoints; of more, the earliest marks are taken back."""
CHANGE, DRAINED, TAKEN, DONE = "drain", "drained endpoints", "drain taken", "drain done"


class _Change(msgspec.Struct, array_like=True, frozen=True):
    number: int
    url: str
    drained: bool


class _News(msgspec.Struct, array_like=True, frozen=True):
    version: int
    urls: list[str]


_encode = msgspec.msgpack.Encoder().encode
_change = msgspec.msgpack.Decoder(_Change).decode
_news = msgspec.msgpack.Decoder(_News).decode
_number = msgspec.msgpack.Decoder(int).decode


class DrainedEndpoints:
    """One worker's part."""

    def __init__(self, link: KeeperLink, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._urls: frozenset[str] = frozenset()
        self._endpoints: Sequence[Endpoint] = ()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}
        link.on(DRAINED, self._on_news)
        link.on(DONE, self._on_done)

    def follow(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the endpoints from here on."""
        urls = {each.url for each in endpoints}
        for gone in self._endpoints:
            if gone.drained and gone.url not in urls:
                self._link.ask_keeper(CHANGE, _encode(_Change(0, gone.url, drained=False)))
        self._endpoints = endpoints
        self._mark()

    async def change(self, url: str, *, drained: bool) -> None:
        """Drain an endpoint, or take that back; all workers have taken it afterwards. Raises KeeperSilent if
        it is not known whether they have."""
        number = next(self._numbers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[number] = done
        try:
            if not self._link.ask_keeper(CHANGE, _encode(_Change(number, url, drained))):
                raise KeeperSilent
            await asyncio.wait_for(done, self._timeout_s)
        except TimeoutError:
            raise KeeperSilent from None
        finally:
            del self._asked[number]

    def _mark(self) -> None:
        for endpoint in self._endpoints:
            if (drained := endpoint.url in self._urls) != endpoint.drained:
                endpoint.drained = drained

    def _on_news(self, caller: WorkerName | None, data: bytes) -> None:
        news = _news(data)
        self._urls = frozenset(news.urls)
        self._mark()
        self._link.ask_keeper(TAKEN, _encode(news.version))

    def _on_done(self, caller: WorkerName | None, data: bytes) -> None:
        done = self._asked.get(_number(data))
        if done is not None and not done.done():
            done.set_result(None)


class DrainKeeper:
    """The keeper's part. ``present``: workers that take letters."""

    def __init__(self, send: Callable[[WorkerName, Letter], bool], present: Set[WorkerName]) -> None:
        self.handlers = {CHANGE: self._on_change, TAKEN: self._on_taken}
        self._send = send
        self._present = present
        self._urls: dict[str, None] = {}
        self._version = 0
        self._awaited: dict[int, tuple[WorkerName, int, set[WorkerName]]] = {}
        """Changes that are not done, by their version: who has asked, with which number, and who has not
        taken them."""

    def greet(self, worker: WorkerName) -> None:
        """The worker takes letters from here on."""
        self._tell(worker)

    def forget(self, worker: WorkerName) -> None:
        """The worker has ended."""
        self._strike(worker, self._version)

    def _tell(self, worker: WorkerName) -> bool:
        return self._send(worker, Letter(DRAINED, _encode(_News(self._version, list(self._urls)))))

    def _on_change(self, caller: WorkerName, data: bytes) -> None:
        change = _change(data)
        self._urls.pop(change.url, None)
        if change.drained:
            self._urls[change.url] = None
            if len(self._urls) > MAX_DRAINED:
                del self._urls[next(iter(self._urls))]
        self._version += 1
        told = {worker for worker in self._present if self._tell(worker)}
        self._awaited[self._version] = caller, change.number, told

    def _on_taken(self, caller: WorkerName, data: bytes) -> None:
        self._strike(caller, _number(data))

    def _strike(self, worker: WorkerName, version: int) -> None:
        """The worker has taken the changes up to ``version``, or has ended."""
        for each, (caller, number, missing) in list(self._awaited.items()):
            if each <= version:
                missing.discard(worker)
            if not missing:
                del self._awaited[each]
                self._send(caller, Letter(DONE, _encode(number)))
