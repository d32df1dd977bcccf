"""The interface of an API for generation: how a body becomes a plan, and how replies are formatted.

A dialect is one API (completions, chat, …). It makes a :class:`ReplyFormat` for every request. What is
streamed are server-sent events, unless the format has a ``stream_kind`` of its own. Streams, replies and
engines are the same for all dialects: they get bytes from the format and never ask for the API.
To add an API, copy a folder under ``penstock/dialects/`` and add it to ``penstock/dialects/registry.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from penstock.generation.media.source import ImageSource
from penstock.generation.parsers.delta import Delta, TextKind
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError
from penstock.http.sink import EVENT_STREAM, Headers, StreamKind
from penstock.store.recent_responses import RecentResponses
from penstock.store.stored_response import StoredResponse
from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.rows.token_fields import TokenFields
from penstock.streaming.stream import StreamError
from penstock.streaming.token_names import TokenNames
from penstock.streaming.weight_spans import WeightSpan
from penstock.wire.messages import KVTransferParams

if TYPE_CHECKING:
    from penstock.generation.replies.collected import CollectedReply
    from penstock.generation.replies.logprobs import TokenLogprobs
    from penstock.generation.replies.reply import Prompt, RequestContext, RequestReply


class RequestInfo(NamedTuple):
    """What a dialect knows of a request besides its body."""

    request_id: str | None = None
    """From the header X-Request-Id."""
    tenant: str | None = None
    """Whose API key the request has; None: the server has no keys, or one."""
    accept: Headers = ()
    """Its headers, if they decide on the content type of the reply."""
    session: RecentResponses | None = None
    """Of the WebSocket that it came over: the same object for all requests of the connection. None: HTTP."""
    turn: NextTurn | None = None
    """What it has in common with the turn before; None: nothing is kept of it."""
    path: str = ""
    """Of the request, decoded."""
    target: bytes = b""
    """Path and query, as the client sent them."""
    restored: Callable[[bytes], bytes] = bytes
    """Puts what was lifted out of the body back into JSON that was made of it."""


NO_INFO = RequestInfo()
CONTENT_FILTER = b"content_filter"
"""Finish reason of an output that a filter has ended, of servers whose output the gateway translates."""


class LookedUp(Protocol):
    """What a request needs of earlier ones."""

    @property
    def size(self) -> int:
        """Bytes that the plan has to read."""
        ...

    @property
    def conversation(self) -> str | None:
        """A name of the conversation that the request continues, which only its clients know."""
        ...

    def unknown_bytes(self, turn: NextTurn) -> int:
        """Of :attr:`size`, those that the turn before did not have."""
        ...


class EventContent(msgspec.Struct, gc=False):
    """What one event of a choice has: all that the request asked for."""

    text: bytes = b""
    """JSON-escaped UTF-8."""
    delta: Delta | None = None
    """Replaces ``text`` if tool calls or reasoning are parsed."""
    finish_reason: bytes | None = None
    """In the choice's last event only."""
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    spelled_logprobs: bytes | None = None
    """The API's field ``logprobs``, if it is made already; in place of ``logprobs``."""
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    usage: TokenUsage | None = None
    kv_transfer_params: KVTransferParams | None = None
    weight_versions: Sequence[WeightSpan] | None = None
    """In the choice's last event only."""


class ReplyFormat(ABC):
    """Formats the reply to one request. All text passed for events is JSON-escaped UTF-8.

    Text events of a choice are ``head + text + tail``, and most are written without asking the format. An API
    whose events are numbered, or that repeats the text at the end, has a ``record`` of them.
    """

    __slots__ = ()

    api: str
    """Name of the API in metrics."""
    fast_path: ClassVar[bool] = True
    """Whether text events may be written without asking the format."""
    sends_text: ClassVar[bool] = True
    """Whether replies have the text of their tokens; otherwise text is made only to find stop strings."""
    sends_tokens: ClassVar[bool] = False
    """Whether replies have token ids whatever the plan says, and an event those without text, too."""
    blocks: ClassVar[bool] = False
    """Whether a choice's text belongs to blocks, which :meth:`event` opens and closes: ``head`` then differs
    from block to block, and the format makes the first event and the last one of a choice."""

    collects: ClassVar[bool] = False
    """Whether the rows of a reply that is not streamed go to :meth:`collect` as they arrive."""
    usage_first: ClassVar[bool] = False
    """Whether the opening event of a choice has the usage."""
    stream_kind: StreamKind = EVENT_STREAM
    """The content type of a streamed reply."""
    keep_alive: bytes = b": keep-alive\n\n"
    """What keeps a silent stream open: by default a comment of server-sent events, which clients ignore."""

    id: str
    """The reply's id, for clients and the access log."""
    record: EventRecord | None = None
    """Counts and collects the text events of a reply with one choice, whoever writes them."""

    # -- events

    @abstractmethod
    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        """The bytes before the text of a text event of choice ``index``. With blocks: of the open one."""

    @abstractmethod
    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        """The bytes after the text of a text event."""

    @abstractmethod
    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        """The opening event of choice ``index``; empty if the API has none. The choice's first text event
        then has ``prompt_token_ids``."""

    @abstractmethod
    def event(self, index: int, content: EventContent) -> bytes:
        """One event of choice ``index``, or several where the API has one per kind of content."""

    @abstractmethod
    def end(self, usage: TokenUsage | None) -> bytes:
        """The events after the last choice; with ``usage`` if requested."""

    @abstractmethod
    def error(self, error: StreamError) -> bytes:
        """The events that end a stream that failed after its headers were sent."""

    def take_rest(self) -> Iterator[bytes] | None:
        """What :meth:`event`, :meth:`end` or :meth:`error` have left of their events, as it takes long to
        make: pieces that take less than a turn each, to be sent next. None: nothing."""
        return None

    def token_fields(self, names: TokenNames, width: int, *, ids: bool) -> TokenFields | None:
        """What text events have for each token: logprobs of ``width`` candidates, the token included, none if
        it is 0, and token ids. None: such events are made by :meth:`event`."""
        return None

    def text_open(self, index: int, kind: TextKind) -> bool:
        """Whether a text event of this kind may come next without :meth:`event`."""
        return kind is TextKind.CONTENT

    def choice_ids(self, index: int) -> tuple[str, ...]:
        """Ids of choice ``index`` besides the reply's, by which clients know it."""
        return ()

    # -- the end

    def keep(self, reply: RequestReply) -> Future[None] | None:
        """Called once all choices have ended, before :meth:`end` or :meth:`whole`. What it returns must be
        done before these, for instance a reply's entry in a store; if it fails, the reply ends with an error.
        None: nothing to wait for."""
        return None

    def background_entry(self) -> StoredResponse | None:
        """The entry in the store, before the first event, of a reply that goes on without its client. None:
        the reply ends with its client. The store gets its end from the last event, whose ``response`` is the
        entry's last body; :meth:`keep` returns None."""
        return None

    def queued(self) -> bytes:
        """The first events of such a reply, written once its streams are submitted."""
        return b""

    # -- replies that are not streamed

    def collect(self, index: int, content: EventContent) -> None:
        """What a row has added to choice ``index``, if the format ``collects``."""
        raise NotImplementedError

    @abstractmethod
    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        """The JSON body of a finished reply, in pieces that take a few milliseconds each."""


class Dialect(ABC):
    """One API for one served model."""

    path: ClassVar[str]
    """Path of the route, which may have a name, as ``/{model}``; its method is POST."""
    columns: ClassVar[bool] = False
    """Whether programs may ask for replies as columns (:mod:`penstock.generation.replies.columns`)."""
    sockets: ClassVar[bool] = False
    """Whether a WebSocket may be opened at the path, whose messages are requests of the route
    (:mod:`penstock.api.response_socket`)."""
    lifts_images: ClassVar[bool] = False
    """Whether long base64 may be taken out of a body before it is planned
    (:mod:`penstock.generation.media.lifting`)."""
    stores_images: ClassVar[bool] = False
    """Whether its plans may have a copy of what was lifted, made by :attr:`RequestInfo.restored`."""
    renders: ClassVar[bool] = False
    """Whether a request is answered by what :meth:`rendered` makes of it; nothing is generated."""
    recognizes_clients: ClassVar[bool] = False
    """Whether replies of all routes to those whom :meth:`recognizes` knows have this API's headers."""

    def recognizes(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request for any route comes from a client of this API, which expects its headers and,
        where the route has no API of its own, its errors."""
        return False

    def reply_headers(self, request_id: str) -> Sequence[tuple[bytes, bytes]]:
        """Headers of every reply to a client that the API recognizes."""
        return ()

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[LookedUp] | None:
        """What :meth:`plan` needs and must wait for, such as an earlier reply; None: nothing. Raises
        ApiError, as does waiting for it."""
        return None

    @abstractmethod
    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        """Check a request body and make its plan. ``found``: what :meth:`look_up` gave. Raises ApiError."""

    @abstractmethod
    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:
        """The format of the reply. ``request_id``: unique, for plans without their own."""

    def rendered(
        self, plan: RequestPlan, prompts: Sequence[Prompt], request_id: str, context: RequestContext
    ) -> Iterator[bytes]:
        """The body of the reply of an API that ``renders``, in pieces. Raises ApiError."""
        raise NotImplementedError

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """The body of an error reply, by default in OpenAI's shape."""
        return error.body()


class CountedPrompt(NamedTuple):
    """What a request to count tokens asks to count."""

    prompt: str
    add_special_tokens: bool
    cache_salt: str | None = None
    images: Sequence[ImageSource] = ()
    """The pictures that it shows, in its order."""


class TokenCounter(ABC):
    """One API's route that counts the tokens of a request's prompt."""

    path: ClassVar[str]
    """Path of the route; its method is POST."""

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[LookedUp] | None:
        """As :meth:`Dialect.look_up`."""
        return None

    @abstractmethod
    def prompt(self, body: bytes, info: RequestInfo, found: Any) -> CountedPrompt:
        """Check a request body and render its prompt. Raises ApiError."""

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """The body of an error reply, by default in OpenAI's shape."""
        return error.body()

    @abstractmethod
    def reply(self, count: int) -> bytes:
        """The reply's body."""


class AskedModels(NamedTuple):
    """What a route that describes models gets."""

    cards: Mapping[str, Mapping[str, Any]]
    """The served models by name, as OpenAI's API lists them."""
    card: Callable[[str], Mapping[str, Any]]
    """The card of a model by any of its names. Raises ApiError."""
    body: bytes = b""
    path: str = ""
    """Of the request."""


class DescribingRoute(ABC):
    """One API's route that describes the served models, or the server."""

    method: str
    path: str

    @abstractmethod
    def reply(self, asked: AskedModels) -> bytes:
        """The reply's body, as JSON. Raises ApiError."""

    @abstractmethod
    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """The body of an error reply."""
