"""A request as a chat completion, and the format of its reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.generation.dialect import EventContent
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.replies.token_usage import TokenUsage
from penstock.streaming.stream import StreamError


class TranslatedReply(Protocol):
    """What of a :class:`~penstock.generation.dialect.ReplyFormat` the output of another server needs."""

    keep_alive: bytes

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        """The opening events."""
        ...

    def event(self, index: int, content: EventContent) -> bytes:
        """The events of the next piece of output."""
        ...

    def take_rest(self) -> Iterator[bytes] | None:
        """What is left of them."""
        ...

    def conclude(self, finish_reason: bytes, usage: TokenUsage) -> object:
        """The output has ended."""
        ...

    def end(self, usage: TokenUsage | None) -> bytes:
        """The last events."""
        ...

    def error(self, error: StreamError) -> bytes:
        """The events that end a stream that failed."""
        ...

    def body(self, content: EventContent, usage: TokenUsage) -> Iterator[bytes]:
        """The reply to a request that is not streamed."""
        ...


class TranslatedRequest(NamedTuple):
    """What the endpoint gets, and how its reply is read."""

    fields: dict[str, Any]
    """The body of the chat completion."""
    make_reply: Callable[[], TranslatedReply]
    """Called for each attempt."""
    output: MessageFormat
    """What of the output the client gets."""
    warning: str | None
    """Text of the reply's ``Warning`` header."""
