"""What a parser makes of a piece of output text, and the interface all parsers have."""

from __future__ import annotations

from typing import Protocol

import msgspec


class CallDelta(msgspec.Struct, gc=False):
    """A piece of a tool call."""

    index: int
    """Number of the call in its message, from 0."""
    name: str | None
    """The function's name, in a call's first piece; None in all others."""
    arguments: str
    """The next piece of the arguments' JSON text."""
    id: str | None = None
    """The call's id, beside its name; parsers leave it to :class:`penstock.generation.parsers.message`."""


class Delta(msgspec.Struct, gc=False):
    """The next piece of a message. Pieces joined field by field (calls by index) are the whole message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = msgspec.field(default_factory=list)

    def add(self, other: Delta) -> None:
        """Append the piece that follows."""
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
    """Takes an output's text apart as it comes. How the text is cut into pieces does not change what the
    deltas are when joined."""

    def push(self, text: str) -> Delta:
        """What the next piece of text adds; text that may mean something else yet is held back."""
        ...

    def finish(self) -> Delta:
        """What was held back, at the output's end."""
        ...

    @property
    def idle(self) -> bool:
        """Whether everything that follows is content, and nothing is held back: no need to ask again."""
        ...
