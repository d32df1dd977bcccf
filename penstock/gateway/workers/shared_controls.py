"""The control calls that the workers of a gateway share: the keeper has them, each worker knows what holds.

A worker asks the keeper before it sends a call to servers, and tells it what has become of it. If the worker
ends in between, another one, or the next that starts, sends the call again with the same key: a server
carries it out once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Set
from itertools import count

import msgspec

from penstock.gateway.workers.control_calls import (
    MAX_KEPT_BYTES,
    ControlCall,
    ControlEnd,
    ScopeCalls,
    size_of,
)
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import Letter, WorkerName

TIMEOUT_S = 5.0
"""Wait for the keeper."""
BEGIN, ANSWER, END = "control begins", "control may begin", "control ended"
NEWS, TAKE_OVER = "controls", "control to take over"


class _Question(msgspec.Struct, array_like=True, frozen=True):
    number: int
    call: ControlCall


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    number: int
    refusal: str


class _News(msgspec.Struct, array_like=True, frozen=True):
    """All calls that hold, in the order in which they have settled."""

    calls: list[ControlCall]
    missed: list[str]
    """Endpoints that did not get the latest one."""


_encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(_Question).decode
_answer = msgspec.msgpack.Decoder(_Answer).decode
_end = msgspec.msgpack.Decoder(ControlEnd).decode
_news = msgspec.msgpack.Decoder(_News).decode
_call = msgspec.msgpack.Decoder(ControlCall).decode


class KeeperSilent(Exception):
    """The keeper does not answer."""


class SharedControls:
    """One worker's view of the control calls."""

    def __init__(self, link: KeeperLink, timeout_s: float = TIMEOUT_S) -> None:
        self.calls: list[ControlCall] = []
        """Those that hold, in the order in which they have settled."""
        self.known = asyncio.Event()
        """Set once the keeper has told them."""
        self.on_news: Callable[[list[str]], None] = lambda missed: None
        """Called when they change, with the URLs of endpoints that have missed the latest one."""
        self.on_take_over: Callable[[ControlCall], None] = lambda call: None
        """Called with a call that a worker had begun which has ended."""
        self._link = link
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._untold: dict[str, asyncio.Event] = {}
        """By the keys of calls that were settled."""
        link.on(ANSWER, self._on_answer)
        link.on(NEWS, self._on_news)
        link.on(TAKE_OVER, lambda caller, data: self.on_take_over(_call(data)))

    async def begin(self, call: ControlCall) -> str:
        """Ask for a call; :meth:`end` must follow. Returns why it cannot be made; empty: it can. Raises
        KeeperSilent."""
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            if not self._link.ask_keeper(BEGIN, _encode(_Question(number, call))):
                raise KeeperSilent
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            self.end(ControlEnd(call, settled=False, missed=[]))  # it may have begun
            raise KeeperSilent from None
        finally:
            del self._asked[number]

    def end(self, end: ControlEnd) -> bool:
        """Tell what has become of a call. Returns False if the keeper does not get it."""
        return self._link.ask_keeper(END, _encode(end))

    async def settle(self, end: ControlEnd) -> None:
        """Tell that servers have a call, and wait until all workers are told: this one is the last."""
        told = self._untold.setdefault(end.call.key, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            if self.end(end):
                await asyncio.wait_for(told.wait(), self._timeout_s)
        self._untold.pop(end.call.key, None)

    def _on_answer(self, caller: WorkerName | None, data: bytes) -> None:
        answer = _answer(data)
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer.refusal)

    def _on_news(self, caller: WorkerName | None, data: bytes) -> None:
        news = _news(data)
        self.calls = news.calls
        self.on_news(news.missed)
        self.known.set()
        for call in news.calls:
            if call.key in self._untold:
                self._untold[call.key].set()


class ControlKeeper:
    """The keeper's part. ``present``: workers that take letters."""

    def __init__(self, send: Callable[[WorkerName, Letter], bool], present: Set[WorkerName]) -> None:
        self.handlers = {BEGIN: self._on_begin, END: self._on_end}
        self._send = send
        self._present = present
        self._scopes: dict[tuple[str, str | None, str], ScopeCalls] = {}
        self._owners: dict[tuple[str, str | None, str], WorkerName | None] = {}
        """Who makes a pending call; None: whoever comes next."""
        self._numbers = count(1)

    def greet(self, worker: WorkerName) -> None:
        """The worker takes letters from here on."""
        self._send(worker, Letter(NEWS, _encode(_News(self._calls(), []))))
        for scope, owner in self._owners.items():
            if owner is None:
                self._hand_over(scope, worker)

    def forget(self, worker: WorkerName) -> None:
        """The worker has ended."""
        for scope, owner in self._owners.items():
            if owner == worker:
                self._owners[scope] = None
                if self._present:
                    self._hand_over(scope, min(self._present))

    def _hand_over(self, scope: tuple[str, str | None, str], worker: WorkerName) -> None:
        pending = self._scopes[scope].pending
        assert pending is not None, "it has an owner"
        if self._send(worker, Letter(TAKE_OVER, _encode(pending))):
            self._owners[scope] = worker

    def _calls(self) -> list[ControlCall]:
        calls = [call for scope in self._scopes.values() for call in scope.chain]
        return sorted(calls, key=lambda call: call.number)

    def _on_begin(self, caller: WorkerName, data: bytes) -> None:
        question = _question(data)
        refusal = self._begin(question.call, caller)
        self._send(caller, Letter(ANSWER, _encode(_Answer(question.number, refusal))))

    def _begin(self, call: ControlCall, caller: WorkerName) -> str:
        calls = self._scopes.get(call.scope) or ScopeCalls()
        if refusal := calls.refusal(call):
            return refusal
        if calls.pending is not None or calls.knows(call):
            return ""  # sent again: servers that have it say so
        pending = [each.pending for each in self._scopes.values() if each.pending is not None]
        if size_of([*self._calls(), *pending, call]) > MAX_KEPT_BYTES:
            return f"The calls that the gateway remembers would take more than {MAX_KEPT_BYTES} bytes."
        self._scopes[call.scope] = calls
        calls.pending = call
        self._owners[call.scope] = caller
        return ""

    def _on_end(self, caller: WorkerName, data: bytes) -> None:
        end = _end(data)
        call = end.call
        calls = self._scopes.setdefault(call.scope, ScopeCalls())
        pending = calls.pending
        ends = end.settled or self._owners.get(call.scope) == caller
        if ends and pending is not None and pending.key == call.key:
            calls.pending = None
            del self._owners[call.scope]
        if end.settled and call.key not in calls.keys:
            calls.settle(msgspec.structs.replace(call, number=next(self._numbers)))
        if not calls.chain and calls.pending is None:
            del self._scopes[call.scope]
        elif end.settled and calls.knows(call):
            letter = Letter(NEWS, _encode(_News(self._calls(), end.missed)))
            for worker in sorted(self._present, key=lambda each: each == caller):
                self._send(worker, letter)
