"""The output items of a response while they are written: their JSON, and the events that tell of them.

Text stays JSON-escaped from the token to the final object. A text event is ``head + text``, the sequence
number and ``tail``: no encoder runs for it, and most are written by columns. JSON is made in pieces, when it
is asked for: a message with its logprobs can have tens of megabytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from penstock.dialects.responses.reasoning_content import seal_reasoning
from penstock.generation.replies.logprobs import KeptLogprobs
from penstock.http.errors import encode_json
from penstock.streaming.token_table import escape_json, unescape_json

IN_PROGRESS, COMPLETED, INCOMPLETE = b"in_progress", b"completed", b"incomplete"


class OutputItem(ABC):
    """One item. ``text``: all of its text, JSON-escaped; None before it has any."""

    __slots__ = ("head", "id", "index", "status", "text", "where")

    prefix: ClassVar[str]
    """Prefix of the item's id."""
    delta_event: ClassVar[bytes]
    done_event: ClassVar[bytes]
    text_field: ClassVar[bytes] = b"text"
    """Name of the text in ``done_event``."""
    part_events: ClassVar[tuple[bytes, bytes] | None] = None
    """What opens and closes the item's only part; None: it has no parts."""
    part_place: ClassVar[bytes] = b""
    """The field of events with the index of the part."""

    def __init__(self, id: str, index: int) -> None:
        """``index``: in the response's output."""
        self.id = id.encode()
        self.index = index
        self.status = IN_PROGRESS
        self.text = b""
        """Of a closed item."""
        self.where = b'"item_id":"%b","output_index":%d%b' % (self.id, index, self.part_place)
        name = self.delta_event
        self.head = b'event: %b\ndata: {"type":"%b",%b,"delta":"' % (name, name, self.where)
        """What precedes the text in a text event."""

    @abstractmethod
    def json(self, status: bytes, text: bytes | None) -> Iterator[bytes]:
        """The item, in pieces; without ``text``: before its part is added."""

    def part(self, text: bytes | None) -> Iterator[bytes]:
        """The item's only part, if it has parts, in pieces."""
        raise AssertionError(f"{self.prefix} items have no parts")

    def done_fields(self) -> Iterator[bytes]:
        """The fields of the closed item's ``done_event`` after its place, in pieces."""
        yield b'"%b":"%b"' % (self.text_field, self.text)

    PLAIN_TAIL: ClassVar[bytes] = b"}\n\n"
    """What follows the sequence number in a text event."""


class MessageItem(OutputItem):
    """Text."""

    __slots__ = ("logprobs",)

    prefix = "msg"
    delta_event, done_event = b"response.output_text.delta", b"response.output_text.done"
    part_events = b"response.content_part.added", b"response.content_part.done"
    part_place = b',"content_index":0'
    PLAIN_TAIL = b',"logprobs":[]}\n\n'

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self.logprobs = KeptLogprobs()

    def json(self, status: bytes, text: bytes | None) -> Iterator[bytes]:
        yield b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[' % (self.id, status)
        if text is not None:
            yield from self.part(text)
        yield b"]}"

    def part(self, text: bytes | None) -> Iterator[bytes]:
        yield b'{"type":"output_text","annotations":[],"logprobs":'
        if text is None:
            yield b'[],"text":""}'
            return
        yield from self.logprobs.entries()
        yield b',"text":"%b"}' % text

    def done_fields(self) -> Iterator[bytes]:
        yield b'"text":"%b","logprobs":' % self.text
        yield from self.logprobs.entries()


class ReasoningItem(OutputItem):
    """What the model thought, as content."""

    __slots__ = ("_sealed",)

    prefix = "rs"
    delta_event, done_event = b"response.reasoning_text.delta", b"response.reasoning_text.done"
    part_events = b"response.content_part.added", b"response.content_part.done"
    part_place = b',"content_index":0'
    part_type: ClassVar[bytes] = b"reasoning_text"

    def __init__(self, id: str, index: int, *, sealed: bool) -> None:
        """``sealed``: whether it ends with ``encrypted_content``."""
        super().__init__(id, index)
        self._sealed = sealed

    def json(self, status: bytes, text: bytes | None) -> Iterator[bytes]:
        part = b"" if text is None else b"".join(self.part(text))
        sealed = b""
        if self._sealed:
            value = None if text is None else seal_reasoning(unescape_json(text))
            sealed = b',"encrypted_content":%b' % encode_json(value)
        yield b'{"id":"%b","type":"reasoning","status":"%b",%b%b}' % (
            self.id,
            status,
            self._parts(part),
            sealed,
        )

    def _parts(self, part: bytes) -> bytes:
        return b'"summary":[],"content":[%b]' % part

    def part(self, text: bytes | None) -> Iterator[bytes]:
        yield b'{"type":"%b","text":"%b"}' % (self.part_type, text or b"")


class SummaryItem(ReasoningItem):
    """What the model thought, as the summary that the request asks for."""

    __slots__ = ()

    delta_event = b"response.reasoning_summary_text.delta"
    done_event = b"response.reasoning_summary_text.done"
    part_events = b"response.reasoning_summary_part.added", b"response.reasoning_summary_part.done"
    part_place = b',"summary_index":0'
    part_type = b"summary_text"

    def _parts(self, part: bytes) -> bytes:
        return b'"summary":[%b]' % part


class CompactionItem(OutputItem):
    """A sealed summary."""

    __slots__ = ("sealed",)

    prefix = "cmp"
    delta_event = done_event = b""  # its text is in no event

    def __init__(self, id: str, index: int, *, sealed: str = "") -> None:
        super().__init__(id, index)
        self.sealed = sealed

    def json(self, status: bytes, text: bytes | None) -> Iterator[bytes]:
        yield b'{"id":"%b","type":"compaction","encrypted_content":"%b"}' % (self.id, self.sealed.encode())


class FunctionCallItem(OutputItem):
    """A call of a function."""

    __slots__ = ("_name",)

    prefix = "fc"
    item_type: ClassVar[bytes] = b"function_call"
    delta_event = b"response.function_call_arguments.delta"
    done_event = b"response.function_call_arguments.done"
    text_field = b"arguments"

    def __init__(self, id: str, index: int, *, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(id, index)
        self._name = b'"call_id":"%b","name":"%b"' % (escape_json(call_id), escape_json(name))
        if namespace is not None:
            self._name += b',"namespace":"%b"' % escape_json(namespace)

    def json(self, status: bytes, text: bytes | None) -> Iterator[bytes]:
        yield b'{"id":"%b","type":"%b","status":"%b",%b,"%b":"%b"}' % (
            self.id,
            self.item_type,
            status,
            self._name,
            self.text_field,
            text or b"",
        )


class CustomCallItem(FunctionCallItem):
    """A call of a custom tool, with free text."""

    __slots__ = ()

    prefix = "ctc"
    item_type = b"custom_tool_call"
    delta_event = b"response.custom_tool_call_input.delta"
    done_event = b"response.custom_tool_call_input.done"
    text_field = b"input"
