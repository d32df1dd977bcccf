"""Replies fed with tokens as an engine's rows, without an engine or a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.generation.plan import RequestPlan
from penstock.generation.replies.reply import TextTables
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.generation.planning import tiny_tokenizer
from tests.generation.replying import Desk, tables_of


@cache
def _tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


def streamed_events(
    plan: RequestPlan,
    rows: Sequence[Sequence[int]],
    finish: FinishReason | None = FinishReason.LENGTH,
    error: StreamError | None = None,
    *,
    chat: bool = False,
) -> list[Any]:
    """Events of a streamed reply whose one stream gets these rows of tokens, and then its end."""

    async def run() -> list[Any]:
        desk = Desk(_tables())
        _, sink = desk.streamed(plan, chat=chat)
        desk.deliver(desk.rows(0, rows, finish or FinishReason.NONE))
        if error is not None:
            desk.streams.fail(0, 0, error)
        data = [line.removeprefix("data: ") for line in sink.lines()]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    return asyncio.run(run())


def collected_reply(
    plan: RequestPlan,
    tokens: Sequence[int],
    finish: FinishReason = FinishReason.LENGTH,
    *,
    chat: bool = False,
) -> Any:
    """Body of a reply that is not streamed, with one stream of these tokens."""

    async def run() -> Any:
        desk = Desk(_tables())
        reply = desk.collected(plan, chat=chat)
        desk.deliver(desk.rows(0, [tokens], finish))
        await reply.done
        return json.loads(b"".join(reply.format.whole(reply)))

    return asyncio.run(run())
