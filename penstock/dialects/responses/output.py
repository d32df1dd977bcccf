"""The output of a response: pieces of text, reasoning and calls become items, one after the other.

A streamed reply sends the events that the methods return, a whole reply drops them: so both have the same
items.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.dialects.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    SummaryItem,
)
from penstock.dialects.responses.text_logprobs import TextLogprobs
from penstock.dialects.responses.tools import CallItemTool
from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.token_table import escape_json


class OutputOptions(NamedTuple):
    """What a request says about its output items."""

    called: Mapping[str, CallItemTool] = MappingProxyType({})
    """Tools by function name, those whose calls are no plain function calls."""
    summary: bool = False
    """Whether reasoning is sent as summary."""
    sealed: bool = False
    """Whether reasoning has ``encrypted_content``."""


class Output:
    """The items of one response. All methods that return bytes return events."""

    __slots__ = ("_id", "_logprobs", "_options", "_record", "closed", "open")

    def __init__(self, response_id: str, record: EventRecord, options: OutputOptions) -> None:
        """``record`` numbers all events, and has the text of the open item."""
        self._id = response_id.removeprefix("resp_")
        self._record = record
        self._options = options
        self._logprobs = TextLogprobs()
        self.closed: list[bytes] = []
        """Items as JSON."""
        self.open: OutputItem | None = None

    def add(self, delta: Delta, logprobs: TokenLogprobs | None = None) -> bytes:
        events = []
        for piece, entries in zip(
            delta.pieces, self._logprobs.entries_by_piece(delta, logprobs), strict=True
        ):
            if isinstance(piece, CallDelta):
                events.append(self._add_call(piece))
            elif piece.reasoning:
                events.append(self._add_reasoning(piece.text))
            else:
                events.append(self._add_text(piece.text, entries))
        return b"".join(events)

    def add_text(self, text: bytes, logprobs: TokenLogprobs | None) -> bytes:
        """Output that is text alone, JSON-escaped."""
        if logprobs is not None:
            return self.add_escaped(text, self._logprobs.entries(logprobs))
        return self.add_escaped(text) if text else b""

    def _add_text(self, text: str, logprobs: bytes | None) -> bytes:
        """White space between items is no text of either."""
        if not isinstance(self.open, MessageItem) and (self.open is not None or self.closed):
            text = text.lstrip()
        return self.add_escaped(escape_json(text), logprobs) if text else b""

    def add_escaped(self, text: bytes, logprobs: bytes | None = None) -> bytes:
        """``text``: JSON-escaped; ``logprobs``: of its tokens, as a JSON list."""
        opening = b""
        if not isinstance(self.open, MessageItem):
            opening = self._open(MessageItem(self._new_id(MessageItem), len(self.closed) + bool(self.open)))
        item = self.open
        assert isinstance(item, MessageItem)
        return opening + self._delta(
            text, item.PLAIN_TAIL if logprobs is None else item.add_logprobs(logprobs)
        )

    def _add_reasoning(self, text: str) -> bytes:
        opening = b""
        if not isinstance(self.open, ReasoningItem):
            text = text.lstrip()
            if not text:
                return b""
            kind = SummaryItem if self._options.summary else ReasoningItem
            number = len(self.closed) + bool(self.open)
            opening = self._open(kind(self._new_id(kind), number, sealed=self._options.sealed))
        assert self.open is not None
        return opening + self._delta(escape_json(text), self.open.PLAIN_TAIL)

    def _add_call(self, call: CallDelta) -> bytes:
        opening = b""
        if call.name is not None:
            tool = self._options.called.get(call.name) or CallItemTool(call.name)
            kind = CustomCallItem if call.custom else FunctionCallItem
            number = len(self.closed) + bool(self.open)
            item = kind(
                self._new_id(kind), number, call_id=call.id or "", name=tool.name, namespace=tool.namespace
            )
            opening = self._open(item)
        assert self.open is not None
        if not call.arguments:
            return opening
        return opening + self._delta(escape_json(call.arguments), self.open.PLAIN_TAIL)

    def finish(self, *, cut: bool) -> bytes:
        """The output has ended; ``cut``: by max_output_tokens."""
        opening = b""
        if self.open is None and not self.closed:  # clients look for a message
            opening = self._open(MessageItem(self._new_id(MessageItem), 0))
        return opening + self._close(INCOMPLETE if cut else COMPLETED)

    def items(self) -> bytes:
        """All items as JSON, separated by commas; an open one as incomplete."""
        items = self.closed
        if self.open is not None:
            items = [*items, self.open.json(INCOMPLETE, bytes(self._record.text))]
        return b",".join(items)

    # -- items

    def _new_id(self, kind: type[OutputItem]) -> str:
        """An id by which the store finds the item's response."""
        return f"{kind.prefix}_{self._id}{len(self.closed) + bool(self.open):04x}"

    def _open(self, item: OutputItem) -> bytes:
        closing = self._close(COMPLETED)
        self.open = item
        events = [
            closing,
            self._item_event(b"response.output_item.added", item, item.json(IN_PROGRESS, None)),
        ]
        if item.part_events is not None:
            events.append(self._part_event(item.part_events[0], item, b""))
        return b"".join(events)

    def _close(self, status: bytes) -> bytes:
        item = self.open
        if item is None:
            return b""
        events = []
        text = bytes(self._record.text)
        events.append(self.event(item.done_event, b"%b,%b" % (item.where, item.done_fields(text))))
        if item.part_events is not None:
            events.append(self._part_event(item.part_events[1], item, text))
        self._record.text.clear()
        self.open = None
        self.closed.append(item.json(status, text))
        events.append(self._item_event(b"response.output_item.done", item, self.closed[-1]))
        return b"".join(events)

    # -- events

    def event(self, name: bytes, fields: bytes) -> bytes:
        """``fields``: the members of the event's JSON object."""
        number = self._record.number
        self._record.number = number + 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, fields)

    def _delta(self, text: bytes, tail: bytes) -> bytes:
        assert self.open is not None
        return self._record.event(self.open.head, text, tail)

    def _item_event(self, name: bytes, item: OutputItem, json: bytes) -> bytes:
        return self.event(name, b'"output_index":%d,"item":%b' % (item.index, json))

    def _part_event(self, name: bytes, item: OutputItem, text: bytes) -> bytes:
        return self.event(name, b'%b,"part":%b' % (item.where, item.part(text)))
