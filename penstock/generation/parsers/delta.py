"""The interface of the output parsers (tool calls, reasoning), and the deltas they return."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Protocol

import msgspec


class CallDelta(msgspec.Struct, gc=False):
    """The next piece of a tool call."""

    index: int
    """Number of the call in its message, from 0."""
    name: str | None
    """The function's name in the call's first piece; None in all others."""
    arguments: str
    """The next piece of the arguments' JSON text."""
    id: str | None = None
    """The call's id in its first piece: the model's if its format has ids, otherwise set by
    :mod:`penstock.generation.parsers.message`."""
    custom: bool = False
    """Whether the function is a custom tool; ``arguments`` is then its input, as plain text."""


class TextKind(Enum):
    CONTENT = auto()
    REASONING = auto()


class TextDelta(msgspec.Struct, gc=False):
    """The next piece of content or of reasoning."""

    text: str
    reasoning: bool = False


class Delta:
    """The next pieces of a message, in the order of the output. Neighbours of the same kind (calls: of the
    same index) are one piece."""

    __slots__ = ("pieces",)

    def __init__(self, *, reasoning: str = "", content: str = "", calls: Iterable[CallDelta] = ()) -> None:
        """In this order."""
        self.pieces: list[TextDelta | CallDelta] = []
        if reasoning:
            self.pieces.append(TextDelta(reasoning, reasoning=True))
        if content:
            self.pieces.append(TextDelta(content))
        for call in calls:
            self.add_call(call)

    def add_content(self, text: str) -> None:
        self._add_text(text, reasoning=False)

    def add_reasoning(self, text: str) -> None:
        self._add_text(text, reasoning=True)

    def _add_text(self, text: str, *, reasoning: bool) -> None:
        if not text:
            return
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, TextDelta) and last.reasoning == reasoning:
            last.text += text
        else:
            self.pieces.append(TextDelta(text, reasoning))

    def add_call(self, call: CallDelta) -> None:
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, CallDelta) and last.index == call.index:
            last.arguments += call.arguments
        else:
            self.pieces.append(call)

    def add(self, other: Delta) -> None:
        """Append the pieces that follow these."""
        for piece in other.pieces:
            if isinstance(piece, CallDelta):
                self.add_call(piece)
            else:
                self._add_text(piece.text, reasoning=piece.reasoning)

    @property
    def content(self) -> str:
        return self._text(reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._text(reasoning=True)

    def _text(self, *, reasoning: bool) -> str:
        texts = [
            piece.text
            for piece in self.pieces
            if isinstance(piece, TextDelta) and piece.reasoning == reasoning
        ]
        return "".join(texts)

    @property
    def calls(self) -> list[CallDelta]:
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]

    def __bool__(self) -> bool:
        """Whether there are any pieces."""
        return bool(self.pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Delta) and self.pieces == other.pieces

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Delta({self.pieces})"


class OutputParser(Protocol):
    """Parses an output's text incrementally. The joined deltas do not depend on how the text is split."""

    def push(self, text: str) -> Delta:
        """The delta of the next piece of text; text whose meaning is still open is held back."""
        ...

    def finish(self, *, cut: bool) -> Delta:
        """The delta of held back text, at the output's end. ``cut``: max_tokens ended it, so the beginning of
        a call is no content."""
        ...

    @property
    def idle(self) -> bool:
        """Whether all text that follows is content and nothing is held back; this then stays true."""
        ...

    @property
    def open(self) -> TextKind | None:
        """What the output is in if nothing is held back: text without any character of :attr:`guard` and
        without white space at its end may then pass as that without a push. None: it may not."""
        ...

    @property
    def guard(self) -> str:
        """The characters with which a marker may begin while the parser is open."""
        ...
