"""Replies fed with tokens as an engine's rows, without an engine or a connection."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from penstock.api.bodies import collected_body
from penstock.api.collected import CollectedReply
from penstock.api.events import EventShape
from penstock.api.fleet import Fleet
from penstock.api.plan import RequestPlan
from penstock.api.process import _text_tables
from penstock.api.replies import Prompt, RequestContext, RequestReply
from penstock.api.sink import Listener
from penstock.api.streamed import StreamedReply
from penstock.metrics.histogram import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS, Histogram
from penstock.streaming.stream import StreamError
from penstock.streaming.table import StreamTable
from penstock.wire.frames import Finish, TokenFrame

from .planning import tiny_tokenizer

VOCABULARY = 16384


class MemorySink:
    """Keeps the chunks that are written to it."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    @property
    def write(self) -> Callable[[bytes], object]:
        return self.chunks.append

    def listen(self, listener: Listener) -> None: ...

    def start(self) -> None: ...

    def finish(self) -> None: ...

    def cut(self) -> None: ...

    def events(self) -> list[Any]:
        """All events, parsed; the end marker as text."""
        body = b"".join(chunk.split(b"\r\n", 1)[1].removesuffix(b"\r\n") for chunk in self.chunks).decode()
        data = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
        return [event if event == "[DONE]" else json.loads(event) for event in data]


def _context() -> RequestContext:
    streams = StreamTable(VOCABULARY, Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
    tables = _text_tables(tiny_tokenizer(), VOCABULARY)
    return RequestContext(cast(Fleet, None), streams, tables, lambda reply, outcome: None, 1 << 20)


def _deliver(
    reply: RequestReply, rows: Sequence[Sequence[int]], finish: Finish | None, error: StreamError | None
) -> None:
    streams = reply.context.streams
    stream = reply.add(Prompt(b"\0\0\0\0", 1), 0)
    handle = streams.open(stream, 0.0)
    position = 0
    for number, tokens in enumerate(rows):
        last = finish is not None and number == len(rows) - 1
        frame = TokenFrame(
            1,
            np.array([handle], np.int32),
            np.array([position], np.int32),
            np.array(tokens, np.int32),
            None if len(tokens) == 1 else np.array([len(tokens)], np.int32),
            np.array([finish], np.int8) if last else None,
        )
        streams.deliver(0, frame, 0.0)
        position += len(tokens)
    if error is not None:
        streams.fail(0, handle, error)


def streamed_events(
    plan: RequestPlan,
    rows: Sequence[Sequence[int]],
    finish: Finish | None = Finish.LENGTH,
    error: StreamError | None = None,
) -> list[Any]:
    """Events of a streamed reply whose one stream gets these rows of tokens, and then its end."""

    async def run() -> list[Any]:
        sink = MemorySink()
        shape = EventShape(chat=plan.chat, request_id="r", model="m")
        _deliver(StreamedReply(_context(), plan, shape, 0.0, sink), rows, finish, error)
        return sink.events()

    return asyncio.run(run())


def collected_reply(plan: RequestPlan, tokens: Sequence[int], finish: Finish = Finish.LENGTH) -> Any:
    """Body of a reply that is not streamed, with one stream of these tokens."""

    async def run() -> Any:
        shape = EventShape(chat=plan.chat, request_id="r", model="m")
        reply = CollectedReply(_context(), plan, shape, 0.0)
        _deliver(reply, [tokens], finish, None)
        await reply.done
        return json.loads(collected_body(reply))

    return asyncio.run(run())
