"""The interface of an API for generation: how a body becomes a plan, and how replies are formatted.

A dialect is one API (completions, chat, …). It makes a :class:`ReplyFormat` for every request. Streams,
replies and engines are the same for all dialects: they get bytes from the format and never ask for the API.
To add an API, copy a folder under ``penstock/dialects/`` and add it to ``penstock/dialects/registry.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from penstock.generation.parsers.delta import Delta
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.messages import KVTransferParams

if TYPE_CHECKING:
    from penstock.generation.replies.collected import CollectedReply
    from penstock.generation.replies.logprobs import TokenLogprobs


class ReplyFormat(ABC):
    """Formats the reply to one request. All text passed for events is JSON-escaped UTF-8."""

    __slots__ = ()

    fast_path: ClassVar[bool] = True
    """Whether plain events are ``head + text + tail``, written without asking the format. False if the format
    must see every event, to number them or to repeat the text at the end."""

    id: str
    """The reply's id, for clients and the access log."""

    # -- events

    @abstractmethod
    def head(self, index: int) -> bytes:
        """The bytes before the text of a text event of choice ``index``."""

    @abstractmethod
    def tail(self) -> bytes:
        """The bytes after the text of a text event."""

    @abstractmethod
    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        """The opening event of choice ``index``; empty if the API has none. The choice's first text event
        then has ``prompt_token_ids``."""

    @abstractmethod
    def event(
        self,
        index: int,
        text: bytes,
        *,
        delta: Delta | None = None,
        finish_reason: bytes | None = None,
        stop_reason: int | str | None = None,
        logprobs: TokenLogprobs | None = None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        usage: TokenUsage | None = None,
        kv_transfer_params: KVTransferParams | None = None,
    ) -> bytes:
        """One event of a choice with all fields the request asked for. ``delta`` replaces ``text`` if tool
        calls or reasoning are parsed; only the choice's last event has a ``finish_reason``."""

    @abstractmethod
    def end(self, usage: TokenUsage | None) -> bytes:
        """The events after the last choice; with ``usage`` if requested."""

    @abstractmethod
    def error(self, error: StreamError) -> bytes:
        """The events that end a stream that failed after its headers were sent."""

    # -- replies that are not streamed

    @abstractmethod
    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        """The JSON body of a finished reply, in pieces that take a few milliseconds each."""


class Dialect(ABC):
    """One API for one served model."""

    path: ClassVar[str]
    """Path of the route; its method is POST."""

    @abstractmethod
    def plan(self, body: bytes, request_id: str | None = None) -> RequestPlan:
        """Check a request body and make its plan. ``request_id``: from the header X-Request-Id. Raises
        ApiError."""

    @abstractmethod
    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:
        """The format of the reply. ``request_id``: unique, for plans without their own."""

    def error_body(self, error: ApiError) -> bytes:
        """The body of an error reply, by default in OpenAI's shape."""
        return error.body()
