"""Counting tokens by HTTP: many requests that continue long conversations at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

from penstock.api.byte_budget import ByteBudget
from penstock.api.planning import MAX_LOOK_UPS
from penstock.api.routes.count_tokens import CountTokensRoutes
from penstock.config.serve import ServeConfig
from penstock.generation.dialect import CountedPrompt, LookedUp, RequestInfo, TokenCounter
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from tests.api.requests import api_request
from tests.generation.planning import tiny_tokenizer
from tests.http.requests import http_request, replied


class Continuing(TokenCounter):
    """What it looks up is held until all requests are allowed to go on."""

    path = "/v1/count"

    def __init__(self) -> None:
        self.allowed = asyncio.Event()
        self.now = 0

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[LookedUp]:
        return self._find()

    async def _find(self) -> LookedUp:
        self.now += 1
        await self.allowed.wait()
        return cast(LookedUp, SimpleNamespace(size=10))

    def prompt(self, body: bytes, info: RequestInfo, found: Any) -> CountedPrompt:
        self.now -= 1
        return CountedPrompt("def main():", add_special_tokens=False)

    def reply(self, count: int) -> bytes:
        return b"%d" % count


def test_few_conversations_are_looked_up_at_the_same_time() -> None:
    async def run() -> None:
        counter = Continuing()
        encoder = PromptEncoder(tiny_tokenizer(), None)
        handle = CountTokensRoutes(ServeConfig(), encoder, 2048, ByteBudget(1 << 20)).handler(counter)
        requests = [http_request("POST", body=b"{}") for _ in range(3 * MAX_LOOK_UPS)]
        asked = [asyncio.ensure_future(handle(api_request(request))) for request in requests]
        while counter.now < MAX_LOOK_UPS:  # noqa: ASYNC110 - the requests begin
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert counter.now == MAX_LOOK_UPS
        counter.allowed.set()
        await asyncio.gather(*asked)
        assert counter.now == 0
        count = tiny_tokenizer().encode("def main():", False)
        bodies = [replied(request).body for request in requests]
        assert bodies == [b"%d" % len(count)] * len(asked)

    asyncio.run(asyncio.wait_for(run(), 60))
