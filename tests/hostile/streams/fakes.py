"""An API server's end of the wire over links in memory: a sound engine, and peers that send anything."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

import numpy as np

from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_log import TokenLog
from penstock.wire.decoding import decode_from_server
from penstock.wire.frames import FinishReason, TokenFrame, encode_frame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    Abort,
    EngineInfo,
    Hello,
    SamplingParams,
    Submit,
    Welcome,
    encode,
)
from penstock.wire.sockets import EngineLink

VOCABULARY = 100
INFO = EngineInfo("fake", 1000, VOCABULARY, 8)


class FakeLink:
    """What an engine has sent, and what it was sent."""

    def __init__(self) -> None:
        self.arriving: deque[list[bytes]] = deque()
        self.sent: list[Submit | Abort] = []
        self.closed = False

    fd = monitor_fd = 1_000_000  # never registered

    def lost(self) -> bool:
        return False

    @property
    def has_message(self) -> bool:
        return bool(self.arriving)

    def receive(self) -> list[bytes] | None:
        return self.arriving.popleft() if self.arriving else None

    def send(self, parts: list[bytes]) -> None:
        for part in parts:
            message = decode_from_server(part)
            if isinstance(message, Submit | Abort):
                self.sent.append(message)

    def close(self) -> None:
        self.closed = True


class Reply:
    """Keeps what a stream gets; asserts that nothing follows its end."""

    arrays = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = ""
        """The finish reason or the error's code."""

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        assert not self.end, "a row after the end"
        self.tokens += tokens
        if finish:
            self.end = finish.name

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        assert not self.end, "prompt logprobs after the end"

    def on_transfer(self, stream: Stream, params: bytes) -> None:
        assert not self.end, "parameters after the end"

    def on_resumed(self, rank: int, position: int) -> None:
        pass

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        assert not self.end, "a second end"
        self.end = error.code


class ApiServer:
    """An API server with ``ranks`` connected engines. To be made within a running loop."""

    def __init__(self, ranks: int, resume_timeout_s: float = 60.0) -> None:
        metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
        self.streams = OutputProcessor([None] * VOCABULARY, metrics, TokenLog())
        hello = Hello(ENGINE_PROTOCOL_VERSION, 0, 0)
        self.client = EngineClient(ranks, {}, hello, lambda info: None)
        self.outcomes: Counter[str] = Counter()
        self.client.open(self.streams, resume_timeout_s, self.outcomes)
        self.connections = self.client._connections
        self.links: list[FakeLink] = []
        for rank in range(ranks):
            self.connect(rank)

    def connect(self, rank: int) -> FakeLink:
        """A new connection of engine ``rank``, as the first one or after the last one was closed."""
        link = FakeLink()
        engine = self.client.engines[rank]
        engine.link = cast(EngineLink, link)
        self.links[rank:] = [link, *self.links[rank + 1 :]]
        self.arrive(rank, [encode(Welcome(ENGINE_PROTOCOL_VERSION, rank, 0, INFO))])
        return link

    def engine(self, rank: int) -> EngineState:
        return self.client.engines[rank]

    def connected(self, rank: int) -> bool:
        return not self.links[rank].closed

    def arrive(self, rank: int, *messages: list[bytes]) -> None:
        """Messages of an engine, which are received together."""
        self.links[rank].arriving.extend(messages)
        self.connections._receive(self.engine(rank))
        self.connections._flush_all()

    def open(self, rank: int, max_tokens: int = 20) -> tuple[Stream, Reply]:
        """A stream that engine ``rank`` is to run."""
        reply = Reply()
        stream = Stream(reply, 0, rank, lambda data: None)
        self.streams.open(stream, 0.0, max_tokens)
        self.client.submit(stream, Submit(stream.handle, b"\1\0\0\0", SamplingParams(max_tokens, 7)))
        self.connections._flush_all()
        return stream, reply


def token_at(handle: int, position: int) -> int:
    return (7 * handle + 13 * position) % VOCABULARY


class SoundEngine:
    """Gives every stream of engine ``rank`` its tokens, a few at a time."""

    def __init__(self, server: ApiServer, rank: int) -> None:
        self._server = server
        self._rank = rank
        self._seen = 0
        self._running: dict[int, tuple[int, int]] = {}
        """By handle: position and number of tokens."""
        self._step = 0

    def step(self, counts: Sequence[int]) -> list[bytes] | None:
        """A frame with so many tokens for each stream, in turn; None without streams."""
        self._read()
        rows = []
        for (handle, (position, total)), count in zip(list(self._running.items()), counts, strict=False):
            end = min(position + count, total)
            tokens = [token_at(handle, place) for place in range(position, end)]
            rows.append((handle, position, tokens, FinishReason.LENGTH if end == total else 0))
            if end == total:
                del self._running[handle]
            else:
                self._running[handle] = end, total
        self._step += 1
        return encode_frame(frame_of(rows, step=self._step)) if rows else None

    def _read(self) -> None:
        sent = self._server.links[self._rank].sent
        for message in sent[self._seen :]:
            assert isinstance(message, Submit), "a sound stream was aborted"
            self._running[message.stream] = message.resumed, message.sampling.max_tokens
        self._seen = len(sent)


def frame_of(rows: Sequence[tuple[int, int, Sequence[int], int]], step: int = 1) -> TokenFrame:
    """Rows of handle, position, tokens and finish reason."""
    finish = np.array([row[3] for row in rows], np.int8)
    counts = np.array([len(row[2]) for row in rows], np.int32)
    return TokenFrame(
        step=step,
        stream=np.array([row[0] for row in rows], np.int32),
        position=np.array([row[1] for row in rows], np.int32),
        tokens=np.array([token for row in rows for token in row[2]], np.int32),
        count=counts,
        finish=finish if finish.any() else None,
    )
