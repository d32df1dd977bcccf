"""What an HTTP API for generation has to define: how a body becomes a plan, and how a reply is spelled.

A dialect is one API (completions, chat, …) of one server. It makes a :class:`ReplyFormat` for every request.
Streams, replies and engines are the same for all dialects; they ask the format for bytes and never for the
API. To add an API, add a folder under ``penstock/dialects/`` and name its class in
``penstock/dialects/registry.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from penstock.generation.parsers.delta import Delta
from penstock.generation.plan import RequestPlan
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.messages import KVTransferParams

if TYPE_CHECKING:
    from penstock.generation.collected import CollectedReply
    from penstock.generation.logprobs import TokenLogprobs


class TokenUsage(NamedTuple):
    """Token counts of a request, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None: not reported."""


class ReplyFormat(ABC):
    """Spells the reply of one request in one API. All text in events is JSON-escaped UTF-8."""

    __slots__ = ()

    id: str
    """The reply's id, as clients and the access log see it."""

    # -- events

    @abstractmethod
    def head(self, index: int) -> bytes:
        """All bytes of a plain event of choice ``index`` before its text."""

    @abstractmethod
    def tail(self) -> bytes:
        """All bytes of a plain event after its text."""

    @abstractmethod
    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        """The event that opens choice ``index``; empty where the API has none. If it is empty, the choice's
        first text event carries ``prompt_token_ids``."""

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
        """One event of a choice with everything the client asked for. ``delta`` replaces ``text`` where tool
        calls or reasoning are parsed; ``finish_reason`` is set in the last event of the choice."""

    @abstractmethod
    def end(self, usage: TokenUsage | None) -> bytes:
        """The events after the last choice; ``usage`` if the client wants it."""

    @abstractmethod
    def error(self, error: StreamError) -> bytes:
        """The events that end a stream which failed after its headers were sent."""

    # -- replies that are not streamed

    @abstractmethod
    def whole(self, reply: CollectedReply) -> bytes:
        """The JSON body of a finished reply."""


class Dialect(ABC):
    """One API, for one served model."""

    path: ClassVar[str]
    """The route, a POST."""

    @abstractmethod
    def plan(self, body: bytes, request_id: str | None = None) -> RequestPlan:
        """Check a request body and turn it into a plan. ``request_id``: from the header X-Request-Id. Raises
        ApiError."""

    @abstractmethod
    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:
        """The format of the reply. ``request_id`` is unique."""

    def error_body(self, error: ApiError) -> bytes:
        """The body of an error reply: OpenAI's shape unless the API has its own."""
        return error.body()
