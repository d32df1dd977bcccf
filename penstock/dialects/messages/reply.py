"""Events and whole replies of ``/v1/messages``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from penstock.dialects.messages.blocks import BlockSequence, Kind, Piece, Start, Step, start_fields
from penstock.dialects.messages.compaction import CompactedMessage
from penstock.dialects.messages.errors import error_body
from penstock.dialects.whole_calls import arguments_object
from penstock.generation.dialect import CONTENT_FILTER, EventContent, ReplyFormat
from penstock.generation.parsers.delta import TextKind
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.reply import ABORT
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.streaming.stream import StreamError
from penstock.streaming.token_table import escape_json

_USAGE = (
    b'"usage":{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,'
    b'"server_tool_use":null,"output_tokens_details":%b,"output_tokens":%d'
)
_WHOLE_USAGE = _USAGE + b'%b,"cache_creation":null,"inference_geo":null,"service_tier":"standard"}'
_END_FIELDS = b'"stop_reason":%b,"stop_sequence":%b,"stop_details":null,"container":null'
_MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"%b","type":"message",'
    b'"role":"assistant","model":"%b","content":[],'
    + _END_FIELDS % (b"null", b"null")
    + b","
    + _WHOLE_USAGE
    + b"}}\n\n"
)
_MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{'
    + _END_FIELDS
    + b"},"
    + _USAGE
    + b'%b}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)
_BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b":"'
_DELTA_TYPES = {
    Kind.TEXT: b'text_delta","text',
    Kind.THINKING: b'thinking_delta","thinking',
    Kind.TOOL_USE: b'input_json_delta","partial_json',
}
_DELTA_END = b'"}}\n\n'

_decode = msgspec.json.Decoder().decode


class MessageFields(NamedTuple):
    """What the reply needs of its request."""

    id: str
    model: str
    request_id: str
    """What errors name."""
    omit_thinking: bool = False
    """Whether the text of thinking is in the signatures alone."""
    context: float = math.inf
    """Most tokens of prompt and output together."""
    max_tokens: int = 0
    """Most tokens of the output; 0: none is sent."""
    compacted: CompactedMessage | None = None
    """What the conversation was replaced by: the first block."""


class MessagesReply(ReplyFormat):
    """A message: blocks of text, thinking and calls of tools."""

    __slots__ = ("_blocks", "_fields", "_finish_reason", "_head", "_stop_sequence", "id")

    api = "messages"

    blocks = True
    usage_first = True
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, fields: MessageFields) -> None:
        self.id = fields.id
        self._fields = fields
        self._blocks = BlockSequence(self.id, omit_thinking=fields.omit_thinking)
        if fields.compacted is not None:
            self._blocks.index = 0
        self._finish_reason: bytes | None = None
        self._stop_sequence: str | None = None
        self._head = b""

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        if kind is TextKind.CONTENT:
            return self._head
        return _DELTA % (self._blocks.index, _DELTA_TYPES[Kind.THINKING])

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return _DELTA_END

    def text_open(self, index: int, kind: TextKind) -> bool:
        if kind is TextKind.CONTENT:
            return self._blocks.open is Kind.TEXT
        return self._blocks.open is Kind.THINKING and not self._blocks.omits_thinking

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        assert usage is not None  # usage_first
        start = escape_json(self.id), escape_json(self._fields.model), *_counts(usage), b""
        compacted = self._fields.compacted
        return _MESSAGE_START % start + (b"" if compacted is None else _compaction_events(compacted))

    def event(self, index: int, content: EventContent) -> bytes:
        blocks, events, text = self._blocks, b"", content.text
        if content.delta is not None:
            events = b"".join(map(self._spell, blocks.push(content.delta)))
        elif text and blocks.open is Kind.TEXT:
            events = b"".join((self._head, text, _DELTA_END))
        elif text and blocks.takes_text(text):
            events = b"".join((self._spell(blocks.open_text()), self._head, text, _DELTA_END))
        elif text:
            events = b"".join(map(self._spell, blocks.text(Kind.TEXT, _decode(b'"%b"' % text))))
        if content.finish_reason is not None:
            self._finish(content.finish_reason, content.stop_reason)
            events += b"".join(map(self._spell, self._blocks.finish()))
        return events

    def _spell(self, step: Step) -> bytes:
        if isinstance(step, Piece):
            start = self._head if step.kind is Kind.TEXT else _DELTA % (step.block, _DELTA_TYPES[step.kind])
            return b"".join((start, encode_json(step.text)[1:-1], _DELTA_END))
        if isinstance(step, Start):
            self._head = _DELTA % (step.block, _DELTA_TYPES[Kind.TEXT])
            return _START % (step.block, encode_json(start_fields(step)))
        if not step.signature:
            return _BLOCK_STOP % step.block
        start = _DELTA % (step.block, b'signature_delta","signature')
        return b"".join((start, step.signature.encode(), _DELTA_END, _BLOCK_STOP % step.block))

    def end(self, usage: TokenUsage | None) -> bytes:
        assert usage is not None  # the plan asks for it
        return _MESSAGE_END % (*self._end_fields(usage), *_counts(usage), self._iterations(usage))

    def _iterations(self, usage: TokenUsage) -> bytes:
        """The tokens of a compaction and of the message, apart; empty: there was none."""
        compacted = self._fields.compacted
        if compacted is None:
            return b""
        parts = _iteration("compaction", compacted.usage), _iteration("message", usage)
        return b',"iterations":' + encode_json(parts)

    def _end_fields(self, usage: TokenUsage) -> tuple[bytes, bytes]:
        """The values of _END_FIELDS."""
        return encode_json(self._stop_reason(usage)), encode_json(self._stop_sequence)

    def error(self, error: StreamError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(stream_failed(error), self._fields.request_id)

    # -- the end

    def conclude(self, finish_reason: bytes, usage: TokenUsage) -> None:
        """The output has ended; called before :meth:`end`, by who has no reply to :meth:`keep`."""

    def _finish(self, finish_reason: bytes, stop_reason: int | str | None) -> None:
        self._finish_reason = finish_reason
        if isinstance(stop_reason, str):
            self._stop_sequence = stop_reason

    def _stop_reason(self, usage: TokenUsage) -> str:
        if self._fields.compacted is not None and self._fields.compacted.paused:
            return "compaction"
        if self._finish_reason == b"length":
            full = usage.prompt_tokens + usage.completion_tokens >= self._fields.context
            cut = full and usage.completion_tokens < self._fields.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if self._finish_reason == ABORT:
            return "pause_turn"
        if self._finish_reason == CONTENT_FILTER:
            return "refusal"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.called else "end_turn"

    # -- replies that are not streamed

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        choice = reply.choices[0]
        blocks, delta = self._blocks, choice.take_delta()
        steps = blocks.text(Kind.TEXT, choice.text.decode()) if delta is None else blocks.push(delta)
        return self._body(steps, choice.finish_reason, choice.stop_reason, reply.usage())

    def body(self, content: EventContent, usage: TokenUsage) -> Iterator[bytes]:
        """The whole reply that has this ``content``, a delta with its finish reason, in pieces."""
        assert content.delta is not None, "the caller gives one"
        steps = self._blocks.push(content.delta)
        return self._body(steps, content.finish_reason or b"stop", content.stop_reason, usage)

    def _body(
        self, steps: Iterable[Step], finish_reason: bytes, stop_reason: int | str | None, usage: TokenUsage
    ) -> Iterator[bytes]:
        separator = b'{"id":%b,"type":"message","role":"assistant","model":%b,"content":[' % (
            encode_json(self.id),
            encode_json(self._fields.model),
        )
        compacted = self._fields.compacted
        first = () if compacted is None else (compacted.block(),)
        for block in chain(first, _joined(chain(steps, self._blocks.finish()))):
            yield separator + encode_json(block)
            separator = b","
        if separator != b",":  # there is no block
            yield separator
        self._finish(finish_reason, stop_reason)
        yield b"]," + _END_FIELDS % self._end_fields(usage) + b"," + self._usage(usage) + b"}"

    def _usage(self, usage: TokenUsage) -> bytes:
        return _WHOLE_USAGE % (*_counts(usage), self._iterations(usage))


def _compaction_events(compacted: CompactedMessage) -> bytes:
    """The events of the first block."""
    block = compacted.block()
    summary = {
        "type": "content_block_delta",
        "index": 0,
        "delta": {
            "type": "compaction_delta",
            "content": block["content"],
            "encrypted_content": block["encrypted_content"],
        },
    }
    start = _START % (0, encode_json(block | {"content": None}))
    return b"%bevent: content_block_delta\ndata: %b\n\n%b" % (start, encode_json(summary), _BLOCK_STOP % 0)


def _iteration(kind: str, usage: TokenUsage) -> dict[str, Any]:
    uncached, cached, _, generated = _counts(usage)
    return {
        "type": kind,
        "input_tokens": uncached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "output_tokens": generated,
    }


def _counts(usage: TokenUsage) -> tuple[int, int, bytes, int]:
    """The values of _USAGE: input tokens that were not cached, those that were, details, output tokens."""
    cached, thinking = usage.cached_tokens or 0, usage.reasoning_tokens
    details = b"null" if thinking is None else b'{"thinking_tokens":%d}' % thinking
    return usage.prompt_tokens - cached, cached, details, usage.completion_tokens


def _joined(steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    """The blocks of a whole reply."""
    block: dict[str, Any] = {}
    texts: list[str] = []
    for step in steps:
        if isinstance(step, Start):
            block = start_fields(step)
            texts.clear()
        elif isinstance(step, Piece):
            texts.append(step.text)
        else:
            text = "".join(texts)
            if step.kind is Kind.TOOL_USE:
                block["input"] = arguments_object(text)
            else:
                block[step.kind.value] = text
            if step.signature:
                block["signature"] = step.signature
            yield block
