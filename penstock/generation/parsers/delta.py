"""The interface of the output parsers (tool calls, reasoning), and the deltas they return."""

from __future__ import annotations

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
    """The call's id in its first piece; :mod:`penstock.generation.parsers.message` sets it."""


class Delta(msgspec.Struct, gc=False):
    """The next piece of a message. All pieces joined by field (calls by index) are the whole message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = msgspec.field(default_factory=list)

    def add(self, other: Delta) -> None:
        """Append the piece that follows this one."""
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.calls:
            last = self.calls[-1] if self.calls else None
            if last is not None and last.index == call.index:
                last.arguments += call.arguments
            else:
                self.calls.append(call)

    def __bool__(self) -> bool:
        """Whether the piece adds anything."""
        return bool(self.content or self.reasoning or self.calls)


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
    def open(self) -> bool:
        """Whether the output is in content and nothing is held back: text without any character of
        :attr:`guard` and without white space at its end may then pass as content without a push."""
        ...

    @property
    def guard(self) -> str:
        """The characters with which a marker may begin while the parser is open."""
        ...
