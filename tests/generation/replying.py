"""Replies without an engine and without a connection: rows in, bytes out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.completions.reply import CompletionReply
from penstock.dialects.openai_reply import OpenAIReply
from penstock.dispatch.engine_client import EngineClient
from penstock.generation.dialect import ReplyFormat
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.reply import Prompt, RequestContext, RequestReply, TextTables
from penstock.generation.replies.streamed import StreamedReply
from penstock.http.sink import EVENT_STREAM, Listener, StreamKind
from penstock.http.write_target import WriteTarget
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.stream import Stream, StreamError
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs
from penstock.wire.regroup import merge_frames

VOCABULARY = 16384
PROMPT = Prompt(b"\1\0\0\0\2\0\0\0", 2)


class MemorySink:
    """A connection whose client reads, or does not while ``stuck``."""

    def __init__(self) -> None:
        self.data = b""
        self.listener: Listener | None = None
        self.over: asyncio.Future[StreamError | None] = asyncio.get_running_loop().create_future()
        """What its reply said at its end."""
        self.starts = 0
        self.ended = ""
        """How the body ended: finish or cut; empty while it goes on."""
        self.unread_bytes = 0

    write_target: WriteTarget | None = None

    def write(self, data: bytes) -> None:
        assert self.starts == 1, "bytes before the headers"
        assert not self.ended, "bytes after the end"
        self.data += data

    def listen(self, listener: Listener) -> None:
        self.listener = listener

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        self.starts = 1
        self.write(data)
        if last:
            self._end("finish")

    def unread(self) -> int:
        return self.unread_bytes

    def cut(self) -> None:
        self._end("cut")

    def _end(self, how: str) -> None:
        assert not self.ended, "a second end"
        self.ended = how

    def lines(self) -> list[str]:
        """What each event holds, comments included."""
        text = self.data.decode()
        assert not text or text.endswith("\n\n"), "an event is cut"
        return text.split("\n\n")[:-1]

    def events(self) -> list[Any]:
        """The JSON events."""
        lines = [line.removeprefix("data: ") for line in self.lines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


class FakeFleet:
    """Takes note of the streams that are to stop."""

    def __init__(self) -> None:
        self.aborted: list[Stream] = []
        self.stopped = 0
        """How many of them ended well, by a stop string."""

    def abort(self, stream: Stream, *, stopped: bool = False) -> None:
        self.aborted.append(stream)
        self.stopped += stopped


GUARD = "<"
"""Of the parsers that tests use."""


@dataclass
class Desk:
    """What an API server has around its replies. To be used within a running loop."""

    tables: TextTables
    max_backlog: int = 1 << 20
    engine_client: FakeFleet = field(default_factory=FakeFleet)
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
        self.streams = OutputProcessor(self.tables.plain, metrics, guarded=self.tables.guarded(GUARD))
        self.context = RequestContext(
            engine_client=cast(EngineClient, self.engine_client),
            streams=self.streams,
            tables=self.tables,
            on_end=self._on_end,
            max_backlog=self.max_backlog,
        )
        self.positions: dict[int, int] = {}

    def _on_end(self, reply: RequestReply, outcome: str) -> None:
        self.outcomes.append(outcome)

    def streamed(
        self,
        plan: RequestPlan,
        prompt: Prompt = PROMPT,
        *,
        chat: bool = False,
        format: ReplyFormat | None = None,
    ) -> tuple[StreamedReply, MemorySink]:
        """``format``: of another API than chat and completions."""
        sink = MemorySink()
        format = format or self._format(chat)
        reply = StreamedReply(self.context, plan, format, 0.0, sink=sink, on_end=sink.over.set_result)
        sink.listen(reply)
        self.open(reply, prompt)
        return reply, sink

    def collected(
        self,
        plan: RequestPlan,
        prompt: Prompt = PROMPT,
        *,
        chat: bool = False,
        format: ReplyFormat | None = None,
    ) -> CollectedReply:
        """``format``: of another API than chat and completions."""
        reply = CollectedReply(self.context, plan, format or self._format(chat), 0.0)
        self.open(reply, prompt)
        return reply

    def _format(self, chat: bool) -> OpenAIReply:
        kind = ChatReply if chat else CompletionReply
        return kind("r", "m", "assistant")

    def open(self, reply: RequestReply, prompt: Prompt = PROMPT) -> None:
        prompt = copy(prompt)  # a request for its logprobs adds to it
        for _ in range(reply.plan.n):
            written = isinstance(reply, StreamedReply)
            self.positions[self.streams.open(reply.add(prompt, 0), 0.0, written=written)] = 0

    def rows(
        self,
        handle: int,
        parts: Sequence[Sequence[int]],
        finish: FinishReason = FinishReason.NONE,
        *,
        logprobs: bool = False,
    ) -> list[TokenFrame]:
        """A frame for each part of the stream's further tokens; the last one has the ``finish``."""
        frames = []
        for number, tokens in enumerate(parts, 1):
            end = finish if number == len(parts) else FinishReason.NONE
            frames.append(
                TokenFrame(
                    step=number,
                    stream=np.array([handle], np.int32),
                    position=np.array([self.positions[handle]], np.int32),
                    tokens=np.array(tokens, np.int32),
                    count=None if len(tokens) == 1 else np.array([len(tokens)], np.int32),
                    finish=np.array([end], np.int8) if end else None,
                    logprobs=made_up_logprobs(tokens) if logprobs and tokens else None,
                )
            )
            self.positions[handle] += len(tokens)
        return frames

    def deliver(self, frames: Sequence[TokenFrame], *, merged: int = 1) -> None:
        """Frames in order, so many at a time merged, as for a server that is behind."""
        for start in range(0, len(frames), merged):
            self.streams.process_frame(0, merge_frames(frames[start : start + merged]), float(start))


def made_up_logprobs(tokens: Sequence[int]) -> Logprobs:
    """The sampled token and one alternative for every token."""
    ids = np.array([[token, 0] for token in tokens], np.int32)
    values = np.array([[-token / 7, -1.5] for token in tokens], np.float32)
    place = np.arange(len(tokens), dtype=np.int32)
    return Logprobs(place, ids, values, np.ones(len(tokens), np.int32))


@dataclass
class Reading:
    """What a client has of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: Any = None
    usage: Any = None


def read_stream(sink: MemorySink) -> Reading:
    """The joined events of a stream of one choice; asserts that none is without content."""
    reading = Reading()
    for event in sink.events():
        if event.get("usage"):
            reading.usage = without_nulls(event["usage"])
        for choice in event.get("choices", ()):
            role = choice.get("delta", {}).get("role")
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            assert reading.finish_reason is None, "an event after the end"
            assert text or role or choice["finish_reason"], f"an event without content: {choice}"
            reading.text += text
            tokens, logprobs = choice.get("token_ids") or [], choice["logprobs"] or {}
            reading.tokens += tokens
            for key, values in logprobs.items():
                assert len(values) == len(tokens), "logprobs and token ids out of step"
                reading.logprobs.setdefault(key, []).extend(values)
            reading.finish_reason = choice["finish_reason"]
            reading.stop_reason = choice.get("stop_reason")
    return reading


def within_text(reading: Reading) -> Reading:
    """``reading`` with places of tokens at most at the text's end, as a whole reply has them. An event may
    tell where a token begins whose text is held back, and which a stop string cuts later."""
    places = reading.logprobs.get("text_offset", [])
    places[:] = [min(place, len(reading.text)) for place in places]
    return reading


def read_body(reply: CollectedReply) -> Reading:
    """A body of one choice that is not streamed."""
    assert reply.done.result() is None
    body = json.loads(b"".join(reply.format.whole(reply)))
    [choice] = body["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Reading(
        text,
        choice.get("token_ids") or [],
        choice["logprobs"] or {},
        choice["finish_reason"],
        choice["stop_reason"],
        without_nulls(body["usage"]),
    )


def without_nulls(value: Any) -> Any:
    """Objects without their null fields, which events omit."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}


def tables_of(tokenizer: Tokenizer) -> TextTables:
    return TextTables.make(tokenizer, VOCABULARY)


def in_loop(test: Callable[[], None]) -> None:
    """Runs ``test`` within an event loop, which replies need for their futures."""

    async def run() -> None:
        test()

    asyncio.run(run())
