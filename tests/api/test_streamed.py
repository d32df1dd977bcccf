"""Streamed replies: the joined text of a stream's events is the tokenizer's decode of its tokens."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from penstock.api.events import EventShape
from penstock.api.fleet import Fleet
from penstock.api.process import _text_tables
from penstock.api.replies import Prompt, RequestContext
from penstock.api.sink import Listener
from penstock.api.streamed import StreamedReply
from penstock.metrics.histogram import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS, Histogram
from penstock.streaming.table import StreamTable
from penstock.wire.frames import Finish, TokenFrame

from .planning import body, planner, tiny_tokenizer

VOCABULARY = 16384


class MemorySink:
    """Keeps the events that are written to it."""

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
        data = [chunk.split(b"\r\n", 1)[1].decode() for chunk in self.chunks]
        lines = "".join(piece.removesuffix("\r\n") for piece in data).split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


def streamed_text(tokens: list[int]) -> str:
    """What a client reads when each token is a row of its own."""

    async def run() -> str:
        streams = StreamTable(
            VOCABULARY, Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS)
        )
        tables = _text_tables(tiny_tokenizer(), VOCABULARY)
        context = RequestContext(cast(Fleet, None), streams, tables, lambda reply, outcome: None, 1 << 20)
        sink = MemorySink()
        plan = planner().completion(body(stream=True, max_tokens=len(tokens)))
        shape = EventShape(chat=False, request_id="r", model="m")
        stream = StreamedReply(context, plan, shape, 0.0, sink).add(Prompt(b"\0\0\0\0", 1), 0)
        handle = streams.open(stream, 0.0)
        for place, token in enumerate(tokens):
            last = place == len(tokens) - 1
            finish = np.array([Finish.LENGTH], np.int8) if last else None
            row = (np.array([handle], np.int32), np.array([place], np.int32), np.array([token], np.int32))
            streams.deliver(0, TokenFrame(1, *row, None, finish), 0.0)
        return "".join(choice["text"] for event in sink.events() for choice in event["choices"])

    return asyncio.run(run())


def test_no_token_overtakes_a_character_that_is_not_whole() -> None:
    tokenizer = tiny_tokenizer()
    [first, second] = tokenizer.encode("é", add_special_tokens=False)
    [plain] = tokenizer.encode("a", add_special_tokens=False)
    for tokens in (
        [plain, first, second, plain],
        [plain, first, plain, plain],
        [plain, plain, first, plain, second],
    ):
        assert streamed_text(tokens) == tokenizer.decode(tokens)
