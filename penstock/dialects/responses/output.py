"""The output of a response: pieces of text, reasoning and calls become items, one after the other.

A streamed reply sends the events that the methods return, a whole reply drops them: so both have the same
items. Events come in pieces, which are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from penstock.dialects.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    CompactionItem,
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
    """The items of one response."""

    __slots__ = ("_id", "_logprobs", "_options", "_record", "closed", "open")

    def __init__(self, response_id: str, record: EventRecord, options: OutputOptions) -> None:
        """``record`` numbers all events, and has the text of the open item."""
        self._id = response_id.removeprefix("resp_")
        self._record = record
        self._options = options
        self._logprobs = TextLogprobs()
        self.closed: list[OutputItem] = []
        self.open: OutputItem | None = None

    def add(self, delta: Delta, logprobs: TokenLogprobs | None = None) -> Iterator[bytes]:
        """The events of what is next in the output. ``logprobs``: of the tokens that came with it."""
        events: list[Iterable[bytes]] = []
        for piece, scored in zip(delta.pieces, self._logprobs.by_piece(delta, logprobs), strict=True):
            if isinstance(piece, CallDelta):
                events.append(self._add_call(piece))
            elif piece.reasoning:
                events.append(self._add_reasoning(piece.text))
            else:
                events.append(self._add_text(piece.text, scored))
        return chain.from_iterable(events)

    def _add_text(self, text: str, logprobs: TokenLogprobs | None) -> Iterable[bytes]:
        """White space between items is no text of either."""
        if not isinstance(self.open, MessageItem) and (self.open is not None or self.closed):
            text = text.lstrip()
        return self.add_text(escape_json(text), logprobs) if text else ()

    def add_text(self, text: bytes, logprobs: TokenLogprobs | None) -> Iterable[bytes]:
        """As :meth:`add`, of text, which is JSON-escaped."""
        if not text and logprobs is None:
            return ()
        opening: Iterable[bytes] = ()
        if not isinstance(self.open, MessageItem):
            opening = self._open(MessageItem(self._new_id(MessageItem), len(self.closed) + bool(self.open)))
        item = self.open
        assert isinstance(item, MessageItem)
        if logprobs is None:
            return chain(opening, self._delta(text, item.PLAIN_TAIL))
        item.logprobs.add(logprobs)
        return chain(opening, self._delta(text, b',"logprobs":'), logprobs.entries(), (b"}\n\n",))

    def _add_reasoning(self, text: str) -> Iterable[bytes]:
        opening: Iterable[bytes] = ()
        if not isinstance(self.open, ReasoningItem):
            text = text.lstrip()
            if not text:
                return ()
            kind = SummaryItem if self._options.summary else ReasoningItem
            number = len(self.closed) + bool(self.open)
            opening = self._open(kind(self._new_id(kind), number, sealed=self._options.sealed))
        assert self.open is not None
        return chain(opening, self._delta(escape_json(text), self.open.PLAIN_TAIL))

    def _add_call(self, call: CallDelta) -> Iterable[bytes]:
        opening: Iterable[bytes] = ()
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
        return chain(opening, self._delta(escape_json(call.arguments), self.open.PLAIN_TAIL))

    def compacting(self, item: CompactionItem) -> Iterable[bytes]:
        """The first events of a compaction's item."""
        place = b'"item_id":"%b","output_index":%d' % (item.id, item.index)
        added = self._item_event(b"response.output_item.added", item, item.json(IN_PROGRESS, None))
        return chain(added, self.event(b"response.compaction.compacting", place, ()))

    def add_compaction(self, sealed: str) -> Iterable[bytes]:
        """The events of what stands for the conversation before this output."""
        item = CompactionItem(self._new_id(CompactionItem), len(self.closed))
        events = self.compacting(item)
        item.sealed, item.status = sealed, COMPLETED
        self.closed.append(item)
        done = self._item_event(b"response.output_item.done", item, item.json(COMPLETED, b""))
        return chain(events, done)

    def finish(self, *, cut: bool) -> Iterable[bytes]:
        """The output has ended; ``cut``: by max_output_tokens."""
        opening: Iterable[bytes] = ()
        if self.open is None and not self.closed:  # clients look for a message
            opening = self._open(MessageItem(self._new_id(MessageItem), 0))
        return chain(opening, self._close(INCOMPLETE if cut else COMPLETED))

    def items(self) -> Iterator[bytes]:
        """All items as JSON, separated by commas, in pieces; an open one as incomplete."""
        for number, item in enumerate(self.closed):
            if number:
                yield b","
            yield from item.json(item.status, item.text)
        if self.open is not None:
            if self.closed:
                yield b","
            yield from self.open.json(INCOMPLETE, bytes(self._record.text))

    def ids(self) -> tuple[str, ...]:
        """Ids of all items."""
        items = self.closed if self.open is None else [*self.closed, self.open]
        return tuple(item.id.decode() for item in items)

    @property
    def candidates(self) -> int:
        """Logprobs of all items."""
        items = (*self.closed, self.open)
        return sum(item.logprobs.candidates for item in items if isinstance(item, MessageItem))

    # -- items

    def _new_id(self, kind: type[OutputItem]) -> str:
        """An id by which the store finds the item's response."""
        return f"{kind.prefix}_{self._id}{len(self.closed) + bool(self.open):04x}"

    def _open(self, item: OutputItem) -> Iterable[bytes]:
        events = [
            self._close(COMPLETED),
            self._item_event(b"response.output_item.added", item, item.json(IN_PROGRESS, None)),
        ]
        self.open = item
        if item.part_events is not None:
            events.append(self._part_event(item.part_events[0], item, item.part(None)))
        return chain.from_iterable(events)

    def _close(self, status: bytes) -> Iterable[bytes]:
        item = self.open
        if item is None:
            return ()
        item.status, item.text = status, bytes(self._record.text)
        self._record.text.clear()
        self.open = None
        self.closed.append(item)
        events = [self.event(item.done_event, item.where + b",", item.done_fields())]
        if item.part_events is not None:
            events.append(self._part_event(item.part_events[1], item, item.part(item.text)))
        events.append(self._item_event(b"response.output_item.done", item, item.json(status, item.text)))
        return chain.from_iterable(events)

    # -- events

    def event(self, name: bytes, start: bytes, rest: Iterable[bytes]) -> Iterable[bytes]:
        """``start``, ``rest``: the members of the event's JSON object."""
        number = self._record.number
        self._record.number = number + 1
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b' % (name, name, number, start)
        return chain((head,), rest, (b"}\n\n",))

    def _delta(self, text: bytes, tail: bytes) -> Iterable[bytes]:
        assert self.open is not None
        return (self._record.event(self.open.head, text, tail),)

    def _item_event(self, name: bytes, item: OutputItem, json: Iterable[bytes]) -> Iterable[bytes]:
        return self.event(name, b'"output_index":%d,"item":' % item.index, json)

    def _part_event(self, name: bytes, item: OutputItem, part: Iterable[bytes]) -> Iterable[bytes]:
        return self.event(name, item.where + b',"part":', part)
