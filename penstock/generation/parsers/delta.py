"""The interface of the output parsers (tool calls, reasoning), and the deltas they return."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from itertools import groupby
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

    __slots__ = ("_added", "_pieces")

    def __init__(self, *, reasoning: str = "", content: str = "", calls: Iterable[CallDelta] = ()) -> None:
        """In this order."""
        self._pieces: list[TextDelta | CallDelta] = []
        self._added: list[TextDelta | CallDelta] = []
        """What was added since neighbours were joined: joining each would copy a long text again and
        again."""
        self.add_reasoning(reasoning)
        self.add_content(content)
        self._added.extend(calls)

    def add_content(self, text: str) -> None:
        if text:
            self._added.append(TextDelta(text))

    def add_reasoning(self, text: str) -> None:
        if text:
            self._added.append(TextDelta(text, reasoning=True))

    def add_call(self, call: CallDelta) -> None:
        self._added.append(call)

    def add(self, other: Delta) -> None:
        """Append the pieces that follow these."""
        self._added.extend(other.pieces)

    @property
    def pieces(self) -> list[TextDelta | CallDelta]:
        if self._added:
            added, self._added = self._pieces[-1:] + self._added, []
            del self._pieces[-1:]
            if len(added) > 1:
                added = [_joined(list(run)) for _, run in groupby(added, _kind)]
            self._pieces += added
        return self._pieces

    def by_kind(self) -> list[Delta]:
        """The delta in parts, each of reasoning, of content or of calls alone."""
        parts = []
        for _, run in groupby(self.pieces, lambda piece: min(_kind(piece), 0)):
            parts.append(Delta())
            parts[-1]._pieces = list(run)
        return parts

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
        return bool(self._pieces or self._added)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Delta) and self.pieces == other.pieces

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Delta({self.pieces})"


def _kind(piece: TextDelta | CallDelta) -> int:
    """Equal for pieces that are one if they are neighbours."""
    return piece.index if isinstance(piece, CallDelta) else -2 if piece.reasoning else -1


def _joined(pieces: list[TextDelta | CallDelta]) -> TextDelta | CallDelta:
    """One piece of pieces of the same kind."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, CallDelta):
        arguments = "".join([piece.arguments for piece in pieces if isinstance(piece, CallDelta)])
        return CallDelta(first.index, first.name, arguments, first.id, first.custom)
    text = "".join([piece.text for piece in pieces if isinstance(piece, TextDelta)])
    return TextDelta(text, first.reasoning)


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


class TurnParser(OutputParser, Protocol):
    """A parser that also tells where reasoning begins and ends in the text of all pieces."""

    def take_turns(self) -> tuple[list[int], int]:
        """Places where reasoning begins and ends, by turns, since the last call; and from where on there may
        be others."""
        ...
