"""Questions for the token ids of prompts, over servers that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.gateway.kv_events import prompt_tokens
from penstock.gateway.kv_events.prompt_tokens import MAX_ASKED, PAUSE_S, PromptTokens
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.exchange import UpstreamError, UpstreamRequest
from penstock.gateway.upstream.upstream import Upstream

Answer = Callable[[UpstreamRequest], Awaitable[tuple[int, bytes]]]
TOKENS = np.array([1, 2, 3], np.int32).tobytes()


def completion(path: str = "/v1/completions", **fields: Any) -> IncomingRequest:
    return IncomingRequest("POST", path.encode(), path, [], msgspec.json.encode(fields), None)


class World:
    """``answer`` is what servers do; the clock stands at ``now``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
        self.now = 100.0
        self.asked = 0
        self.answer = answer
        self.pool = EndpointPool(Upstream(), lambda endpoint: self.tokens.forget(endpoint))
        self.pool.update([ResolvedEndpoint("http://a:1")])
        self.tokens = PromptTokens(self.pool, lambda: self.now)
        monkeypatch.setattr(prompt_tokens, "fetch", self._fetch)
        monkeypatch.setattr(prompt_tokens, "TOKENIZE_S", 60.0)

    async def _fetch(self, connections: object, request: UpstreamRequest, most: int) -> tuple[int, bytes]:
        self.asked += 1
        return await self.answer(request)

    async def of(self, **fields: Any) -> bytes | None:
        return await self.tokens.of(completion(**fields), self.pool.endpoints)


async def tokenized(request: UpstreamRequest) -> tuple[int, bytes]:
    return 200, b'{"tokens":[1,2,3],"count":3}'


async def gone(request: UpstreamRequest) -> tuple[int, bytes]:
    raise UpstreamError("gone")


def test_a_prompt_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch, tokenized)
        for _ in range(3):
            assert await world.of(model="m", prompt="one two three") == TOKENS
        assert world.asked == 1

    asyncio.run(run())


def test_token_ids_need_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch, gone)
        assert await world.of(model="m", prompt=[1, 2, 3]) == TOKENS
        assert await world.of(model="m", prompt=["one", "two"]) is None
        assert await world.of(model="m", prompt=[1, 1 << 40]) is None
        assert world.asked == 0

    asyncio.run(run())


def test_questions_at_a_time_are_bounded_also_if_they_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        done = asyncio.Event()

        async def later(request: UpstreamRequest) -> tuple[int, bytes]:
            await done.wait()
            return await tokenized(request)

        world = World(monkeypatch, later)
        asking = [asyncio.ensure_future(world.of(model="m", prompt=str(n))) for n in range(2 * MAX_ASKED)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        done.set()
        found = await asyncio.gather(*asking)
        assert (found.count(TOKENS), found.count(None)) == (MAX_ASKED, MAX_ASKED)
        assert await world.of(model="m", prompt="and one more") == TOKENS

    asyncio.run(run())


def test_who_does_not_answer_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch, gone)
        assert await world.of(model="m", prompt="a") is None
        world.answer = tokenized
        assert await world.of(model="m", prompt="b") is None
        assert world.asked == 1
        world.now += PAUSE_S
        assert await world.of(model="m", prompt="c") == TOKENS

    asyncio.run(run())


def test_who_leaves_while_it_is_asked_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async def leave(request: UpstreamRequest) -> tuple[int, bytes]:
            world.pool.update([])
            raise UpstreamError("the endpoint was removed")

        world = World(monkeypatch, leave)
        assert await world.of(model="m", prompt="a") is None
        assert not world.tokens._paused

    asyncio.run(run())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
def test_a_refusal_of_one_prompt_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Among them a model that the server does not know."""

    async def refused(request: UpstreamRequest) -> tuple[int, bytes]:
        return status, b"{}"

    async def run() -> None:
        world = World(monkeypatch, tokenized)
        assert await world.of(model="m", prompt="a") == TOKENS
        world.answer = refused
        assert await world.of(model="x", prompt="b") is None
        world.answer = tokenized
        assert await world.of(model="m", prompt="c") == TOKENS

    asyncio.run(run())


def test_a_server_without_the_route_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(request: UpstreamRequest) -> tuple[int, bytes]:
        return 404, b"{}"

    async def run() -> None:
        world = World(monkeypatch, missing)
        for n in range(3):
            assert await world.of(model="m", prompt=str(n)) is None
        assert world.asked == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        ({"type": "image_url", "image_url": {"url": "http://elsewhere/picture"}}, 0),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, 0),
        ({"type": "text", "text": 'an "image_url" of "type": "image_url"'}, 1),
    ],
)
def test_nobody_fetches_pictures_to_tokenize_them(
    monkeypatch: pytest.MonkeyPatch, part: dict[str, Any], asked: int
) -> None:
    """A server would fetch them once more, and its tokens would not be those that are cached."""

    async def run() -> None:
        world = World(monkeypatch, tokenized)
        messages = [{"role": "user", "content": [part]}]
        tools = [{"function": {"parameters": {"properties": {"image_url": {"type": "string"}}}}}]
        await world.of(path="/v1/chat/completions", model="m", messages=messages, tools=tools)
        assert world.asked == asked

    asyncio.run(run())
