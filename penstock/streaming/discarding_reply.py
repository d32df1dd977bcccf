"""The reply of streams whose request no longer wants them, until their engine has ended them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.streaming.stream import Stream, StreamError
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, RoutedExperts


class DiscardingReply:
    """Counts the tokens of streams that no request wants."""

    arrays = True

    def __init__(self) -> None:
        self.tokens = 0

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        self.tokens += len(tokens)

    def on_admitted(self, stream: Stream, queued: float, at: float) -> None:
        pass

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        pass

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        pass

    def on_routes(self, stream: Stream, routes: RoutedExperts) -> None:
        pass

    def on_vectors(self, stream: Stream, first: int, counts: I32, width: int, values: F32) -> None:
        pass

    def on_resumed(self, rank: int, position: int) -> None:
        pass

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        pass
