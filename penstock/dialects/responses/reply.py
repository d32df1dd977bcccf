"""Events and whole replies of ``/v1/responses``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from penstock.dialects.responses.output import Output, OutputOptions
from penstock.dialects.responses.output_items import MessageItem, ReasoningItem
from penstock.generation.dialect import CONTENT_FILTER, EventContent, ReplyFormat
from penstock.generation.parsers.delta import TextKind
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.reply import ABORT, RequestReply
from penstock.generation.replies.token_usage import TokenUsage
from penstock.generation.replies.turns import Turns
from penstock.http.errors import encode_json
from penstock.store.recent_responses import RecentResponses
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse
from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.stream import StreamError
from penstock.streaming.weight_spans import WeightSpan
from penstock.wire.messages import KVTransferParams

SHORT_BYTES = 128 * 1024
"""Events that are made at once: with logprobs, they take about 1 ms."""
SHORT_CANDIDATES = 2048
"""Logprobs of a response whose JSON is made at once: about 1 ms."""
_CUT = {b"length": b"max_output_tokens", ABORT: ABORT, CONTENT_FILTER: CONTENT_FILTER}
"""Reasons why a response is incomplete, by its finish reason."""
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The API's names by status; all others are server_error."""


class Compacted(msgspec.Struct):
    """What stands for the conversation of a request."""

    sealed: str
    usage: TokenUsage
    """What the summary took."""


class ResponseFields(msgspec.Struct, kw_only=True):
    """What the reply needs of its request."""

    echo: bytes
    """The fields of the response object that repeat the request, as members of a JSON object."""
    options: OutputOptions
    input: bytes
    """A JSON list of the request's own items, each with an id; empty unless the response is to be stored."""
    id: str
    tenant: str
    previous_id: str | None
    stored: bool
    background: bool
    compacted: Compacted | None = None
    """What the request's conversation was replaced by."""
    prewarms: bool = False
    """Whether there is to be no output."""
    session: RecentResponses | None = None
    """What keeps a response that is not stored."""


class ResponsesReply(ReplyFormat):
    """One response."""

    __slots__ = (
        "_created_at",
        "_fields",
        "_final",
        "_output",
        "_rest",
        "_started",
        "_store",
        "id",
        "model",
        "record",
    )

    api = "responses"

    blocks = True
    collects = True

    def __init__(
        self,
        fields: ResponseFields,
        model: str,
        store: ResponseStore | None,
    ) -> None:
        self.id = fields.id
        self.model = model
        self.record = EventRecord()
        self._rest: Iterator[bytes] | None = None
        self._fields = fields
        self._store = store if fields.stored else None
        self._created_at = int(time.time())
        self._output = Output(fields.id, self.record, fields.options)
        self._started = False
        self._final: tuple[bytes, bytes | dict[str, Any]] | None = None
        """The last event's name, and the finished response, or what :meth:`_object` makes it of. No function
        that makes it: that would refer to this reply, which would stay until a full collection."""

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b"" if self._output.open is None else self._output.open.head

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return (MessageItem if kind is TextKind.CONTENT else ReasoningItem).PLAIN_TAIL

    def text_open(self, index: int, kind: TextKind) -> bool:
        return isinstance(self._output.open, MessageItem if kind is TextKind.CONTENT else ReasoningItem)

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        if self._started:
            return b""
        running = tuple(self._object(b"in_progress"))
        events = b"" if self._fields.background else self._response_event(b"response.created", running)
        return events + self._response_event(b"response.in_progress", running) + self._begin()

    def _begin(self) -> bytes:
        """The events before those of the output."""
        self._started, compacted = True, self._fields.compacted
        return b"" if compacted is None else self._made(self._output.add_compaction(compacted.sealed))

    def event(self, index: int, content: EventContent) -> bytes:
        return self._made(self._add(content))

    def collect(self, index: int, content: EventContent) -> None:
        if not self._started:
            self._begin()
        self._add(content)  # its events are not made

    def _add(self, content: EventContent) -> Iterable[bytes]:
        output = self._output
        if self._fields.prewarms:
            return ()
        if content.delta is not None:
            events: Iterable[bytes] = output.add(content.delta, content.logprobs)
        else:
            events = output.add_text(content.text, content.logprobs)
        if content.finish_reason is not None:
            return chain(events, output.finish(cut=content.finish_reason in _CUT))
        return events

    def end(self, usage: TokenUsage | None) -> bytes:
        assert self._final is not None, "keep comes first"
        return self._response_event(self._final[0], self._finished())

    def _finished(self) -> Iterator[bytes]:
        """The finished response, in pieces."""
        assert self._final is not None, "keep comes first"
        response = self._final[1]
        return iter((response,)) if isinstance(response, bytes) else self._object(**response)

    def _response_event(self, name: bytes, response: Iterable[bytes]) -> bytes:
        """``response``: its JSON, in pieces."""
        return self._made(self._output.event(name, b'"response":', response))

    def _made(self, events: Iterable[bytes]) -> bytes:
        """Events in pieces, joined. What is long is left for :meth:`take_rest`, with all that follows; not in
        the background, where whole events are stored."""
        if self._fields.background:
            return b"".join(events)
        if self._rest is not None:
            self._rest = chain(self._rest, events)
            return b""
        made, pieces = bytearray(), iter(events)
        for piece in pieces:
            made += piece
            if len(made) > SHORT_BYTES:
                self._rest = pieces
                break
        return bytes(made)

    def take_rest(self) -> Iterator[bytes] | None:
        rest, self._rest = self._rest, None
        return rest

    def error(self, error: StreamError) -> bytes:
        opening = self.first(0, None, None)
        code = _ERROR_CODES.get(error.status, "server_error")
        shown = {"code": code, "message": error.message, "type": error.code, "param": error.param}
        response = partial(self._object, b"failed", error=encode_json(shown))
        stored = self._put(b"failed", response, Turns())
        if stored is not None:
            stored.add_done_callback(_ignore)
        return opening + self._response_event(b"response.failed", response())

    # -- the end

    def keep(self, reply: RequestReply) -> asyncio.Future[None] | None:
        [choice] = reply.choices
        status = self.conclude(
            choice.finish_reason, reply.usage(), choice.kv_transfer_params, choice.weight_versions
        )
        return self._put(status, self._finished, reply.context.turns)

    def conclude(
        self,
        finish_reason: bytes,
        usage: TokenUsage,
        transfer: KVTransferParams | None = None,
        versions: Sequence[WeightSpan] | None = None,
    ) -> bytes:
        """The output has ended; called before :meth:`end` and :meth:`whole`. Returns its status."""
        cut = None if self._fields.prewarms else _CUT.get(finish_reason)
        status = b"completed" if cut is None else b"incomplete"
        response: dict[str, Any] = {
            "status": status,
            "completed_at": b"%d" % time.time() if cut is None else b"null",
            "incomplete": b"null" if cut is None else b'{"reason":"%b"}' % cut,
            "usage": encode_json(self._usage_field(usage)),
            "transfer": transfer,
            "versions": versions,
            "metrics": usage.metrics(),
        }
        is_short = self._output.candidates <= SHORT_CANDIDATES
        made = b"".join(self._object(**response)) if is_short else response
        self._final = b"response." + status, made
        return status

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        return self._finished()

    def body(self, content: EventContent, usage: TokenUsage) -> Iterator[bytes]:
        """The whole reply that has this ``content``, with its finish reason, in pieces."""
        self._add(content)
        self.conclude(content.finish_reason or b"stop", usage)
        return self._finished()

    def _put(
        self, status: bytes, response: Callable[[], Iterator[bytes]], turns: Turns
    ) -> asyncio.Future[None] | None:
        """Store the finished response, if it is to be stored here."""
        store, session = self._store, self._fields.session
        if session is not None and status != b"failed":
            session.keep(self._entry(status, b"".join(response())))
        if store is None or self._fields.background:
            return None
        if self._output.candidates > SHORT_CANDIDATES:
            return asyncio.ensure_future(self._put_long(store, status, response, turns))
        return store.put(self._entry(status, b"".join(response())))

    async def _put_long(
        self, store: ResponseStore, status: bytes, response: Callable[[], Iterator[bytes]], turns: Turns
    ) -> None:
        """Store a response that is too long to be made at once."""
        async with store.one_long:
            await store.put(self._entry(status, await turns.joined(response())))

    def _entry(self, status: bytes, response: bytes) -> StoredResponse:
        fields = self._fields
        return StoredResponse(
            id=self.id,
            tenant=fields.tenant,
            created_at=self._created_at,
            status=status.decode(),
            body=response,
            input=fields.input,
            previous_id=fields.previous_id,
            model=self.model,
            output_ids=self._output.ids(),
        )

    def background_entry(self) -> StoredResponse | None:
        body = b"".join(self._object(b"queued"))
        return self._entry(b"queued", body) if self._fields.background else None

    def queued(self) -> bytes:
        queued = tuple(self._object(b"queued"))
        return self._response_event(b"response.created", queued) + self._response_event(
            b"response.queued", queued
        )

    # -- the response object

    def _object(
        self,
        status: bytes,
        *,
        completed_at: bytes = b"null",
        error: bytes = b"null",
        incomplete: bytes = b"null",
        usage: bytes = b"null",
        transfer: KVTransferParams | None = None,
        versions: Sequence[WeightSpan] | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Iterator[bytes]:
        yield (
            b'{"id":"%b","object":"response","created_at":%d,"status":"%b","completed_at":%b,"error":%b,'
            b'"incomplete_details":%b,"output":['
        ) % (self.id.encode(), self._created_at, status, completed_at, error, incomplete)
        yield from self._output.items()
        yield b'],"usage":%b%b%b%b,%b}' % (
            usage,
            b"" if transfer is None else b',"kv_transfer_params":' + transfer,
            b"" if versions is None else b',"weight_versions":' + encode_json(versions),
            b"" if metrics is None else b',"metrics":' + encode_json(metrics),
            self._fields.echo,
        )

    def _usage_field(self, usage: TokenUsage) -> dict[str, Any]:
        if self._fields.compacted is not None:
            usage = usage.plus(self._fields.compacted.usage)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0}
            | ({"image_tokens": usage.image_tokens} if usage.image_tokens else {}),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _ignore(stored: asyncio.Future[None]) -> None:
    """The store has logged why it could not keep a failed response."""
    if not stored.cancelled():
        stored.exception()
