"""The content blocks of a reply: which one the next piece of output belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from penstock.dialects.messages.thinking import carrying_signature, signature_of
from penstock.generation.parsers.delta import CallDelta, Delta


class Kind(Enum):
    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"


class Start(NamedTuple):
    """A block begins."""

    block: int
    """Index of the block."""
    kind: Kind
    id: str = ""
    """Id of a tool_use block."""
    name: str = ""


class Piece(NamedTuple):
    """Text of the open block: of a tool_use, JSON of its input."""

    block: int
    """Index of the block."""
    kind: Kind
    text: str


class BlockStop(NamedTuple):
    """The open block ends."""

    block: int
    """Index of the block."""
    kind: Kind
    signature: str = ""
    """Signature of a thinking block."""


Step = Start | Piece | BlockStop


class BlockSequence:
    """Divides an output into blocks. Joined steps do not depend on how the output is cut.

    White space at the start of a text or thinking block is held back, for there may be nothing else: models
    write it between thinking, text and calls. An output that is white space alone is a text.
    """

    def __init__(self, message_id: str, *, omit_thinking: bool = False) -> None:
        """``omit_thinking``: the text of thinking is in the signature alone."""
        self.open: Kind | None = None
        self.index = -1
        """Index of the open block, or of the last one."""
        self.called = False
        """Whether there was a tool_use."""
        self.omits_thinking = omit_thinking
        self._message_id = message_id
        self._gap: list[str] = []
        """White space held back, in pieces: there may be very many."""
        self._gap_kind = Kind.TEXT
        self._thinking: list[str] = []

    def push(self, delta: Delta) -> Iterator[Step]:
        """The steps of the next piece of output."""
        for piece in delta.pieces:
            if isinstance(piece, CallDelta):
                yield from self._call(piece)
            else:
                yield from self.text(Kind.THINKING if piece.reasoning else Kind.TEXT, piece.text)

    def open_text(self) -> Start:
        """Begin a text block, for text that does not start with white space. No block may be open."""
        self.open, self.index = Kind.TEXT, self.index + 1
        self._gap.clear()
        return Start(self.index, Kind.TEXT)

    def takes_text(self, text: bytes) -> bool:
        """Whether JSON-escaped ``text`` begins the first block, and not with white space."""
        return self.index < 0 and not self._gap and 0x20 < text[0] < 0x80 and text[:1] != b"\\"

    def text(self, kind: Kind, text: str) -> Iterator[Step]:
        if self.open is not kind:
            if self._gap_kind is not kind:
                self._gap.clear()
                self._gap_kind = kind
            if not text or text.isspace():
                self._gap.append(text)
                return
            text = "".join([*self._gap, text])
            yield from self._start(kind)
        if kind is Kind.THINKING and self.omits_thinking:
            self._thinking.append(text)
        elif text:
            yield Piece(self.index, kind, text)

    def finish(self) -> Iterator[Step]:
        """The steps of the output's end."""
        gap = "".join(self._gap)
        if self.index < 0 and gap and self._gap_kind is Kind.TEXT:
            yield from self._start(Kind.TEXT)
            yield Piece(self.index, Kind.TEXT, gap)
        yield from self._stop()

    def _call(self, call: CallDelta) -> Iterator[Step]:
        if call.name is not None:
            self.called = True
            id = call.id or ""
            if id.startswith("call_"):
                id = "toolu_" + id[len("call_") :]
            yield from self._start(Kind.TOOL_USE, id, call.name)
        if call.arguments:
            yield Piece(self.index, Kind.TOOL_USE, call.arguments)

    def _start(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._stop()
        self._gap.clear()
        self.index += 1
        self.open = kind
        yield Start(self.index, kind, id, name)

    def _stop(self) -> Iterator[Step]:
        kind, self.open = self.open, None
        if kind is Kind.THINKING:
            text = "".join(self._thinking)
            self._thinking.clear()
            signature = carrying_signature(text) if text else signature_of(self._message_id, self.index)
            yield BlockStop(self.index, kind, signature)
        elif kind is not None:
            yield BlockStop(self.index, kind)


def start_fields(start: Start) -> dict[str, Any]:
    """The field ``content_block`` of the event that starts a block."""
    if start.kind is Kind.TEXT:
        return {"type": "text", "text": "", "citations": None}
    if start.kind is Kind.THINKING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    caller = {"type": "direct"}  # the model itself, not a program of its
    return {"type": "tool_use", "id": start.id, "name": start.name, "input": {}, "caller": caller}
