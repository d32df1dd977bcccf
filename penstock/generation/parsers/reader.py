"""Reads an output that arrives in pieces as if it were one text.

A format is read by a generator: where it needs text that has not arrived it yields, and goes on from there
with the next piece. So formats are written as plain sequences of reads, and no state is kept by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from penstock.generation.parsers.delta import CallDelta, Delta, TextKind
from penstock.streaming.stop_strings import held_back

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads on, and returns a value of the type; yields while text is missing."""

MAX_NAME = 256
"""Maximum characters of a function's or parameter's name; longer text is no name."""
MIN_MARKER = 5
"""Characters from which on the beginning of a marker is taken for one, if max_tokens cut the output there."""
_NOT_IN_NAMES = frozenset(" \t\r\n<>\"'{}[]()=,|｜\\`")


class EndOfOutput(Exception):
    """The output has ended where more text was expected."""


class NotACall(Exception):
    """The text is no call."""


class Reader:
    """The text of an output, and the delta of what was read of it since the last piece."""

    __slots__ = ("_at", "_begun", "_text", "calls", "cut", "delta", "ended", "idle", "open")

    def __init__(self) -> None:
        self._text = ""
        """Text that is not read, after text that may become content."""
        self._at = 0
        """Where reading goes on in the text."""
        self._begun: int | None = None
        """Where the text begins that may become content; None: there is none."""
        self.calls = 0
        """Calls that have started."""
        self.ended = self.cut = False
        """Whether no more text comes; whether as max_tokens ended the output."""
        self.idle = False
        """Whether all text that follows is content."""
        self.open: TextKind | None = None
        """What the output is in, if nothing is held back."""
        self.delta = Delta()

    def feed(self, text: str, steps: Steps[None]) -> Delta:
        """The delta of the next piece of text; ``steps`` read it."""
        if self._begun is None:
            self._text = self._text[self._at :] + text if self._at < len(self._text) else text
            self._at = 0
        else:
            self._text = self._text[self._begun :] + text
            self._at -= self._begun
            self._begun = 0
        self.open = None
        next(steps, None)
        delta, self.delta = self.delta, Delta()
        return delta

    def finish(self, steps: Steps[None], *, cut: bool) -> Delta:
        """The delta of the output's end."""
        if self.idle or self.ended:
            return Delta()
        self.ended, self.cut = True, cut
        return self.feed("", steps)

    # -- reading

    @property
    def unread(self) -> str:
        return self._text[self._at :] if self._at else self._text

    def skip(self, count: int) -> None:
        """The next characters are read."""
        self._at += count

    def more(self) -> Steps[None]:
        """Wait for text."""
        if self.ended:
            raise EndOfOutput
        yield

    def space(self) -> Steps[str]:
        """Read white space, if any; the next character, which is not read."""
        while True:
            text = self.unread
            rest = text.lstrip()
            self.skip(len(text) - len(rest))
            if rest:
                return rest[0]
            yield from self.more()

    def either(self, *marks: str) -> Steps[str]:
        """Read one of ``marks``, of which none starts another; empty if none follows."""
        while True:
            text = self.unread
            for mark in marks:
                if mark and text.startswith(mark):
                    self.skip(len(mark))
                    return mark
            if not any(mark.startswith(text) for mark in marks if mark):
                return ""
            yield from self.more()

    def expect(self, mark: str) -> Steps[None]:
        """Read ``mark``. Raises NotACall if anything else follows."""
        if mark and not (yield from self.either(mark)):
            raise NotACall

    def name(self) -> Steps[str]:
        """Read a name. Raises NotACall if none follows."""
        while True:
            text = self.unread
            end = next((place for place, char in enumerate(text) if char in _NOT_IN_NAMES), None)
            if end == 0 or (end or len(text)) > MAX_NAME:
                raise NotACall
            if end is not None:
                self.skip(end)
                return text[:end]
            yield from self.more()

    def characters(self, count: int) -> Steps[str]:
        """Read a number of characters."""
        while len(self.unread) < count:
            yield from self.more()
        text = self.unread[:count]
        self.skip(count)
        return text

    def until(self, *marks: str, emit: Callable[[str], object], kind: TextKind | None = None) -> Steps[str]:
        """Read up to one of ``marks``, and the mark, which is returned; what precedes it is emitted as it
        arrives. ``kind``: what that is; None: neither content nor reasoning. At the end of the output all is
        emitted, but for the beginning of a mark if max_tokens cut it."""
        while True:
            text = self.unread
            found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                emit(text[:place])
                self.skip(place + len(mark))
                return mark
            held = max([held_back(text, mark) for mark in marks])
            if self.ended and not (self.cut and held >= MIN_MARKER):
                held = 0
            safe = len(text) - held
            if safe:
                emit(text[:safe])
                self.skip(safe)
            self.open = kind if safe == len(text) else None
            yield from self.more()

    def line(self, mark: str) -> Steps[str]:
        """Read a short text up to ``mark``, and the mark. Raises NotACall if it does not come soon."""
        while True:
            text = self.unread
            place = text.find(mark)
            if place > MAX_NAME or (place < 0 and len(text) > MAX_NAME + len(mark)):
                raise NotACall
            if place >= 0:
                self.skip(place + len(mark))
                return text[:place]
            yield from self.more()

    # -- what was read

    def begin(self) -> None:
        """What is read from here on may become content."""
        self._begun = self._at

    def settle(self) -> None:
        """What was read since :meth:`begin` is a call, or belongs to one."""
        self._begun = None

    def closing(self, *marks: str) -> Steps[None]:
        """Read ``marks`` after a call, of which each may be absent."""
        self.begin()
        for mark in marks:
            if mark:
                yield from self.space()
                if (yield from self.either(mark)):
                    self.begin()

    def undecided(self) -> str:
        """What was read since :meth:`begin`, and all that is unread."""
        return "" if self._begun is None else self._text[self._begun :]

    def give_up(self) -> None:
        """What was read since :meth:`begin` is no call. White space after a call is read again."""
        if self._begun is None:
            return
        text = self._text[self._begun : self._at]
        if text.strip():
            self.delta.add_content(text)
        else:
            self._at = self._begun
        self._begun = None

    # -- the delta

    def start_call(self, name: str, id: str | None = None) -> None:
        self.settle()
        self.delta.add_call(CallDelta(self.calls, name, "", id))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self.delta.add_call(CallDelta(self.calls - 1, None, text))

    # -- content

    def content(self, marks: tuple[str, ...]) -> Steps[None]:
        """Read content up to one of ``marks``. White space before it, and the mark, are not content unless
        no call follows (:meth:`begin`). Without marks all that follows is content."""
        while True:
            text = self.unread
            found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
            held = max([held_back(text, mark) for mark in marks], default=0)
            safe = min(found)[0] if found else len(text) - held
            safe = len(text[:safe].rstrip()) if marks else safe
            self.delta.add_content(text[:safe])
            self.skip(safe)
            if found:
                self.begin()
                self.skip(min(found)[0] - safe)
                return
            if self.ended:
                self._end_content(text[safe:], held)
            self.idle = not marks
            self.open = TextKind.CONTENT if safe == len(text) else None
            yield from self.more()

    def _end_content(self, held: str, marker: int) -> None:
        if (self.calls and not held.strip()) or (self.cut and marker >= MIN_MARKER):
            return
        self.delta.add_content(held)
        self.skip(len(held))
