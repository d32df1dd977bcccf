"""The reply to a request for vectors, scores or labels: one matrix, which the rows of its streams fill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.generation.pooling.plan import EncodedInputs, PooledInputs, PoolingPlan
from penstock.generation.replies.token_usage import TokenUsage
from penstock.streaming.engine_faults import INVALID_VECTORS, InvalidOutputError
from penstock.streaming.stream import Stream, StreamError
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, RoutedExperts
from penstock.wire.pooling import PER_TOKEN, PoolingParams

if TYPE_CHECKING:
    from penstock.generation.replies.reply import Choice, RequestContext

STREAM_TOKENS = 2048
"""A request with fewer tokens is one stream; one with more has a stream for each engine."""
STREAM_INPUTS = 8192
"""Inputs of a stream."""
_ABORTED = StreamError(503, "request_aborted", "The request was aborted.")


class ReplyName(NamedTuple):
    """What metrics and logs know the reply by."""

    api: str
    id: str


class StreamInputs(NamedTuple):
    """The consecutive inputs that are one stream."""

    first: int
    """Index of the first one."""
    inputs: int
    prompt: bytes
    """int32 little-endian: their token ids."""
    params: PoolingParams


class PooledReply:
    """Collects vectors; ``done`` resolves once all streams have ended."""

    arrays = True
    choices: Sequence[Choice] = ()
    """Of text: there are none."""
    first_token_at: float | None = None
    first_rank = 0
    """The engine that the first stream was submitted to."""
    resumptions: Sequence[tuple[float, int, int]] = ()
    """For each time that a stream lost its engine: time, rank of the next engine, inputs until then."""
    outcome = ""
    """Set at the end: stop, error, refused or abort."""

    def __init__(
        self,
        context: RequestContext,
        plan: PoolingPlan,
        inputs: EncodedInputs,
        width: int,
        *,
        id: str,
        arrival: float,
    ) -> None:
        """``width``: values of each vector."""
        self.context, self.plan, self.inputs = context, plan, inputs
        self.format = ReplyName(plan.api, id)
        self.arrival = arrival
        self.done: asyncio.Future[StreamError | None] = asyncio.get_running_loop().create_future()
        """Resolves to an error if a stream failed."""
        self.left = False
        """Whether the client has disconnected."""
        self._per_token = plan.task in PER_TOKEN
        self._tokens = len(inputs.ids) // 4
        self._starts: NDArray[np.int64] | None = None
        """int64[N + 1], with a vector per token: where those of each input begin."""
        rows = len(inputs.lengths)
        if self._per_token:
            rows = self._tokens
            self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(inputs.lengths, dtype=np.int64)))
        self._values: F32 = np.empty((rows, width), np.float32)
        self._streams: dict[Stream, int] = {}
        """Running ones, and the index of the first input of each."""

    # -- its streams

    def parts(self, engines: int) -> Iterator[StreamInputs]:
        """The streams to submit, to ``engines`` that take some. Inputs are cut where tokens are even."""
        plan, (ids, lengths, seconds, skipped) = self.plan, self.inputs
        total = self._tokens
        wanted = max(min(engines, total // STREAM_TOKENS), -(-len(lengths) // STREAM_INPUTS), 1)
        ends, cuts = None, []
        if wanted > 1:
            ends = np.cumsum(lengths, dtype=np.int64)
            cuts = np.searchsorted(ends, np.arange(1, wanted) * total / wanted).tolist()
        paired = bool(seconds.any())
        first = 0
        for last in [*cuts, len(lengths)]:
            if last == first:
                continue
            params = PoolingParams(
                task=plan.task,
                lengths=lengths[first:last].astype("<i4", copy=False).tobytes(),
                dimensions=plan.dimensions,
                normalize=plan.normalize,
                activate=plan.activate,
                seconds=seconds[first:last].astype("<i4", copy=False).tobytes() if paired else b"",
                skipped=skipped,
            )
            prompt = ids
            if ends is not None:
                start = int(ends[first - 1]) if first else 0
                prompt = ids[4 * start : 4 * int(ends[last - 1])]
            yield StreamInputs(first, last - first, prompt, params)
            first = last

    def add(self, part: StreamInputs, rank: int) -> Stream:
        """A stream of the reply; the caller opens and submits it."""
        if not self._streams:
            self.first_rank = rank
        stream = Stream(self, len(self._streams), rank, _no_write)
        self._streams[stream] = part.first
        return stream

    def refuse(self) -> None:
        """Not all streams could be submitted; the caller sends the error."""
        self._drop_streams()

    @property
    def ended(self) -> bool:
        return self.done.done()

    def usage(self) -> TokenUsage:
        return TokenUsage(self._tokens, 0, None)

    def pooled(self) -> PooledInputs:
        """What has been made, once all is done."""
        return PooledInputs(self._values, self.inputs.lengths, self._per_token, self.usage())

    # -- rows

    def on_vectors(self, stream: Stream, first: int, counts: I32, width: int, values: F32) -> None:
        if stream not in self._streams:
            return
        at = self._streams[stream] + first
        start, end = at, at + len(counts)
        if self._starts is not None:
            start, end = int(self._starts[start]), int(self._starts[end])
        if width != self._values.shape[1] or int(counts.sum()) != end - start:
            message = (
                f"{counts.sum()} vectors of {width} values, not {end - start} of {self._values.shape[1]}"
            )
            raise InvalidOutputError(INVALID_VECTORS, message)
        self._values[start:end] = values.reshape(-1, width)

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        if len(tokens):
            raise InvalidOutputError(INVALID_VECTORS, "tokens of a stream of inputs")
        first = self._streams.pop(stream, None)
        if first is None or not finish:
            return
        if finish is FinishReason.ABORT:
            self._fail(_ABORTED, "abort")
        elif not self._streams:
            self._end("stop")

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if self._streams.pop(stream, None) is not None:
            self._fail(error, "refused" if error.status < 500 else "error")

    def on_resumed(self, rank: int, position: int) -> None:
        self.resumptions = (*self.resumptions, (time.monotonic(), rank, position))

    def on_admitted(self, stream: Stream, queued: float, at: float) -> None:
        """Nothing tells the time of vectors."""

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        raise InvalidOutputError(INVALID_VECTORS, "logprobs of a stream of inputs")

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        raise InvalidOutputError(INVALID_VECTORS, "kv_transfer_params of a stream of inputs")

    def on_routes(self, stream: Stream, routes: RoutedExperts) -> None:
        raise InvalidOutputError(INVALID_VECTORS, "experts of a stream of inputs")

    # -- the client

    def on_disconnect(self) -> None:
        if not self.ended:
            self.left = True
            self._drop_streams()
            self._end("abort")

    def on_pause(self) -> None:
        pass

    def on_resume(self) -> None:
        pass

    # -- the end

    def _drop_streams(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams:
            self.context.streams.discard(stream)
            self.context.engine_client.abort(stream)

    def _fail(self, error: StreamError, outcome: str) -> None:
        self._drop_streams()
        self._end(outcome, error)

    def _end(self, outcome: str, error: StreamError | None = None) -> None:
        if self.outcome:
            return
        self.outcome = outcome
        self.context.on_end(self, outcome)
        if not self.done.done():  # cancelled when the server stops
            self.done.set_result(error)


def _no_write(data: bytes) -> None:
    """Nothing is streamed."""
