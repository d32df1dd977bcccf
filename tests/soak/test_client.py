"""Clients read, leave, and keep their connections, over real sockets."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.bench.conftest import EVENT, HEAD, Scripted, chunk, stream
from tests.soak.client import ClientPool
from tests.soak.exchange import SentRequest
from tests.soak.request_mix import COMPLETIONS, ClientBehaviour, RequestSpec

PATIENCE_S = 60.0


def spec(
    behaviour: ClientBehaviour = ClientBehaviour.READ, events: int = 0, wait_s: float = 0.0
) -> RequestSpec:
    return RequestSpec(COMPLETIONS, {"prompt": "x"}, behaviour, events=events, wait_s=wait_s)


def ask(script: Scripted, *specs: RequestSpec, seconds: float = PATIENCE_S) -> list[SentRequest]:
    """One after the other, over kept connections where there are."""

    class AlwaysLow(random.Random):
        def random(self) -> float:
            return 0.0

    async def run() -> list[SentRequest]:
        clients = ClientPool(f"http://127.0.0.1:{script.port}", AlwaysLow())
        try:
            return [await clients.send(each, seconds) for each in specs]
        finally:
            clients.close()

    return asyncio.run(run())


def test_a_connection_is_kept(scripted: Scripted) -> None:
    first, second = ask(scripted, spec(), spec())
    assert (first.seen.whole, first.seen.done, first.reused) == (True, True, False)
    assert (second.seen.whole, second.reused, second.port) == (True, True, first.port)
    assert scripted.connections == 1
    assert scripted.requests[0][0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert scripted.requests[0][1] == b'{"prompt":"x"}'


def test_clients_leave(scripted: Scripted) -> None:
    scripted.reply = lambda number: HEAD + chunk(EVENT) * 3
    (late,) = ask(scripted, spec(ClientBehaviour.LEAVE_LATE, events=2))
    assert late.left
    assert late.seen.events >= 2
    scripted.reply = lambda number: b""
    (early,) = ask(scripted, spec(ClientBehaviour.LEAVE_EARLY, wait_s=0.01))
    assert (early.left, early.seen.status) == (True, 0)


def test_one_that_does_not_leave_in_time_sees_the_end(scripted: Scripted) -> None:
    attempts = ask(
        scripted,
        spec(ClientBehaviour.LEAVE_LATE, events=1000),
        spec(ClientBehaviour.LEAVE_EARLY, wait_s=PATIENCE_S),
        spec(ClientBehaviour.STALL, wait_s=0.01),
        spec(ClientBehaviour.SLOW),
    )
    assert all(each.seen.whole and not each.left for each in attempts)


def test_an_end_that_does_not_come(scripted: Scripted) -> None:
    scripted.reply = lambda number: HEAD + chunk(EVENT)
    (attempt,) = ask(scripted, spec(), seconds=0.5)
    assert (attempt.stuck, attempt.left, attempt.seen.events) == (True, False, 1)


def test_a_connection_that_ends(scripted: Scripted) -> None:
    scripted.reply = lambda number: stream(1) if not number else b""
    scripted.closing = lambda number: number > 0
    whole, stale = ask(scripted, spec(), spec())
    assert whole.seen.whole
    assert (stale.stale, stale.left, stale.stuck) == (True, False, False)
    scripted.reply = lambda number: HEAD + chunk(EVENT)
    (broken,) = ask(scripted, spec())
    assert (broken.stale, broken.left, broken.seen.events, broken.seen.whole) == (False, False, 1, False)


def test_no_server() -> None:
    with pytest.raises(OSError, match="111"):
        ask(Scripted(port=1), spec())
