"""Replies that are not streamed: tokens are gathered until all their streams have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.generation.dialect import ReplyFormat
from penstock.generation.plan import RequestPlan
from penstock.generation.replies import Choice, RequestContext, RequestReply
from penstock.streaming.stream import Stream, StreamError
from penstock.wire.logprobs import Logprobs


class CollectedReply(RequestReply):
    """One JSON body. Tokens are only gathered until their stream ends; text is made once."""

    def __init__(
        self, context: RequestContext, plan: RequestPlan, format: ReplyFormat, arrival: float
    ) -> None:
        super().__init__(context, plan, format, arrival)
        self.done: asyncio.Future[StreamError | None] = asyncio.get_running_loop().create_future()
        """Resolves at the end; to an error when a stream failed. Never to an exception: that would refer to
        whoever awaits it, and that to this, for the garbage collector to find."""
        self.left = False
        """The client has gone."""

    def _make_stream(self, index: int, rank: int) -> Stream:
        return Stream(self, index, rank, _no_write)

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        choice.text += text.encode()
        choice.tokens.extend(tokens)
        if choice.logprobs is not None:
            choice.logprobs.add(tokens, logprobs)
        if self.plan.kept is not None and logprobs is not None:
            choice.cumulative_logprob += float(logprobs.values[logprobs.token < len(tokens), 0].sum())
        if self._all_ended():
            self._end(self._outcome())
            self._resolve(None)

    def best_choices(self) -> list[Choice]:
        """What is sent: all choices, or of each prompt's the likeliest as whole outputs."""
        n, kept = self.plan.n, self.plan.kept
        if kept is None:
            return self.choices
        groups = [self.choices[first : first + n] for first in range(0, len(self.choices), n)]
        ranked = [sorted(group, key=lambda choice: -choice.cumulative_logprob)[:kept] for group in groups]
        return [choice for group in ranked for choice in group]

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if not self.ended:
            self.drop_streams(stream)
            self._end("error")
            self._resolve(error)

    def on_disconnect(self) -> None:
        if not self.ended:
            self.drop_streams()
            self._end("abort")
            self.left = True
            self._resolve(None)

    def _resolve(self, error: StreamError | None) -> None:
        if not self.done.done():  # nobody may wait any longer: a server that stops cancels its tasks
            self.done.set_result(error)

    def on_pause(self) -> None:
        pass

    def on_resume(self) -> None:
        pass


def _no_write(data: bytes) -> None:
    raise AssertionError("a collected reply has no fast path")
