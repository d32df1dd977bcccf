"""The reply to a request without ``stream``: one JSON body once all choices have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.reply import Choice, RequestContext, RequestReply
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_table import escape_json
from penstock.wire.logprobs import Logprobs


class CollectedReply(RequestReply):
    """Collects text and tokens; ``format.whole`` makes the body."""

    def __init__(
        self, context: RequestContext, plan: RequestPlan, format: ReplyFormat, arrival: float
    ) -> None:
        super().__init__(context, plan, format, arrival)
        self.done: asyncio.Future[StreamError | None] = asyncio.get_running_loop().create_future()
        """Resolves at the end, to an error if a stream failed. It is no exception: a traceback would make a
        reference cycle with the awaiting task."""
        self.arrays = self._textless
        self.left = False
        """Whether the client has disconnected."""

    def _make_stream(self, index: int, rank: int) -> Stream:
        return Stream(self, index, rank, _no_write)

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        if self.arrays:
            choice.ids += np.asarray(tokens, np.int32).tobytes()
        else:
            choice.tokens.extend(tokens)
        if choice.logprobs is not None:
            choice.logprobs.add(tokens, logprobs)
        if self.format.collects:
            self.format.collect(stream.index, _content(choice, text))
        else:
            choice.text += text.encode()
        if self.plan.kept is not None and logprobs is not None:
            own = (logprobs.token < len(tokens)) & ~logprobs.continues()
            choice.cumulative_logprob += float(logprobs.values[own, 0].sum())
        if self._all_choices_ended():
            self._end(self._complete_outcome())

    def best_choices(self) -> list[Choice]:
        """The choices to send: all, or with best_of the likeliest of each prompt."""
        n, kept = self.plan.n, self.plan.kept
        if kept is None:
            return self.choices
        groups = [self.choices[first : first + n] for first in range(0, len(self.choices), n)]
        ranked = [sorted(group, key=lambda choice: -choice.cumulative_logprob)[:kept] for group in groups]
        return [choice for group in ranked for choice in group]

    # -- the end: all choices have ended (_extend), or one of these

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if not self.ended:
            self.drop_streams(stream)
            self._end(self._unsent_outcome(error), self._with_field(error))

    def on_disconnect(self) -> None:
        if not self.ended:
            self.drop_streams()
            self.left = True
            self._end("abort")

    def _end(self, outcome: str, error: StreamError | None = None) -> None:
        """Every collected reply ends here, once."""
        self._record_end(outcome)
        if not self.done.done():  # cancelled when the server stops
            self.done.set_result(error)

    def on_pause(self) -> None:
        pass

    def on_resume(self) -> None:
        pass


def _content(choice: Choice, text: str) -> EventContent:
    """What a row has added."""
    return EventContent(
        text=escape_json(text),
        delta=choice.take_delta(),
        finish_reason=choice.finish_reason or None,
        stop_reason=choice.stop_reason,
        logprobs=None if choice.logprobs is None else choice.logprobs.take(),
    )


def _no_write(data: bytes) -> None:
    raise AssertionError("a collected reply has no fast path")
