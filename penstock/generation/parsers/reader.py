"""Reads an output that arrives in pieces as if it were one text.

A format is read by a generator: where it needs text that has not arrived it yields, and goes on from there
with the next piece. So formats are written as plain sequences of reads, and no state is kept by hand.

Outputs are long, and their writers not trusted: whatever a text is and however it is cut, each of its
characters is looked at a bounded number of times. So nothing here copies all that has arrived, or searches it
again.
"""

from __future__ import annotations

import re
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
_NAME_END = re.compile("[ \t\r\n<>\"'{}\\[\\]()=,|｜\\\\`]")
_SPACE_END = re.compile(r"\S")
_INSIDE = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""The text inside a JSON string."""
_NOWHERE = -1


class EndOfOutput(Exception):
    """The output has ended where more text was expected."""


class NotACall(Exception):
    """The text is no call."""


class Reader:
    """The text of an output, and the delta of what was read of it since the last piece."""

    __slots__ = (
        "_before",
        "_begun",
        "_kept",
        "_kept_size",
        "_known",
        "_may_call",
        "_places",
        "_supposed",
        "_turns",
        "at",
        "calls",
        "cut",
        "delta",
        "ended",
        "idle",
        "open",
        "text",
    )

    def __init__(self, may_call: Callable[[str], bool] | None = None) -> None:
        """``may_call``: whether a function is one of the request's; None: all are."""
        self._may_call = may_call
        self.text = ""
        """The latest piece, after what was not read of earlier ones."""
        self.at = 0
        """Where reading goes on in the text. A read that waits leaves no more than a mark or a name unread,
        which the next piece follows."""
        self._before = 0
        """Characters of the output before the text."""
        self._turns: list[int] = []
        """Where in the output reasoning begins and ends, by turns."""
        self._begun: int | None = None
        """Where in the text that begins which may become content; None: there is none."""
        self._kept: list[str] = []
        """What of it came in earlier pieces and was read."""
        self._kept_size = 0
        """Characters of that."""
        self._places: dict[str, tuple[int, int]] = {}
        """Places by mark: from where on the text was searched, and where it has the next one, or _NOWHERE."""
        self.calls = 0
        """Calls that have started."""
        self._supposed: Delta | None = None
        """What is a call only if a ``_known`` function is called, too; None: all are."""
        self._known: Callable[[str], bool] = bool
        self.ended = self.cut = False
        """Whether no more text comes; whether as max_tokens ended the output."""
        self.idle = False
        """Whether all text that follows is content."""
        self.open: TextKind | None = None
        """What the output is in, if nothing is held back."""
        self.delta = Delta()

    def feed(self, text: str, steps: Steps[None]) -> Delta:
        """The delta of the next piece of text; ``steps`` read it."""
        if self._begun is not None:
            if self._begun < self.at:
                self._kept.append(self.text[self._begun : self.at])
                self._kept_size += self.at - self._begun
            self._begun = 0
        self._before += self.at
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0
        self._places.clear()
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

    def ahead(self, count: int) -> str:
        """At most so many of the next characters, as far as they have arrived."""
        return self.text[self.at : self.at + count]

    def skip(self, count: int) -> None:
        """The next characters are read. Below 0: the last ones, of the same text, are not."""
        self.at += count

    def more(self) -> Steps[None]:
        """Wait for text."""
        if self.ended:
            raise EndOfOutput
        yield

    def space(self) -> Steps[str]:
        """Read white space, if any; the next character, which is not read."""
        while True:
            found = _SPACE_END.search(self.text, self.at)
            if found:
                self.at = found.start()
                return found[0]
            self.at = len(self.text)
            yield from self.more()

    def either(self, *marks: str) -> Steps[str]:
        """Read one of ``marks``, of which none starts another; empty if none follows."""
        while True:
            for mark in marks:
                if mark and self.text.startswith(mark, self.at):
                    self.at += len(mark)
                    return mark
            rest = len(self.text) - self.at
            if not any(rest < len(mark) and mark.startswith(self.ahead(rest)) for mark in marks):
                return ""
            yield from self.more()

    def expect(self, mark: str) -> Steps[None]:
        """Read ``mark``. Raises NotACall if anything else follows."""
        if mark and not (yield from self.either(mark)):
            raise NotACall

    def name(self) -> Steps[str]:
        """Read a name. Raises NotACall if none follows."""
        while True:
            start = self.at
            found = _NAME_END.search(self.text, start, start + MAX_NAME + 1)
            end = found.start() if found else len(self.text)
            if (found and end == start) or end - start > MAX_NAME:
                raise NotACall
            if found:
                self.at = end
                return self.text[start:end]
            yield from self.more()

    def characters(self, count: int) -> Steps[str]:
        """Read a number of characters."""
        while len(self.text) - self.at < count:
            yield from self.more()
        text = self.ahead(count)
        self.at += count
        return text

    def string(self, emit: Callable[[str], object]) -> Steps[None]:
        """Read the text inside a JSON string, which is emitted as it arrives, and the quote after it."""
        while True:
            inside = _INSIDE.match(self.text, self.at)
            assert inside is not None
            emit(inside[0])
            self.at = inside.end()
            if self.ahead(1) == '"':
                self.at += 1
                return
            yield from self.more()

    def find(self, *marks: str) -> tuple[int, str]:
        """The place in the text of the first of ``marks`` that follows, and the mark; empty without any."""
        best, first = len(self.text), ""
        for mark in marks:
            place = self._place(mark)
            if place >= 0 and (place, mark) < (best, first):
                best, first = place, mark
        return best, first

    def _place(self, mark: str) -> int:
        """Where the text has the next ``mark``, or _NOWHERE. A text is searched once for each mark."""
        at = self.at
        start, place = self._places.get(mark, (len(self.text), _NOWHERE))
        if at < start:  # nothing was searched, or what was read is read again
            near = self.text.find(mark, at, start + len(mark) - 1)
            place = near if near >= 0 else place
        elif place < at and place != _NOWHERE:
            place = self.text.find(mark, at)
        else:
            return place
        self._places[mark] = at, place
        return place

    def until(self, *marks: str, emit: Callable[[str], object], kind: TextKind | None = None) -> Steps[str]:
        """Read up to one of ``marks``, and the mark, which is returned; what precedes it is emitted as it
        arrives. ``kind``: what that is; None: neither content nor reasoning. At the end of the output all is
        emitted, but for the beginning of a mark if max_tokens cut it."""
        while True:
            end, mark = self.find(*marks)
            if mark:
                emit(self.text[self.at : end])
                self.at = end + len(mark)
                return mark
            held = self.held(marks)
            if self.ended and not (self.cut and held >= MIN_MARKER):
                held = 0
            end -= held
            if end > self.at:
                emit(self.text[self.at : end])
                self.at = end
            self.open = None if held else kind
            yield from self.more()

    def held(self, marks: tuple[str, ...]) -> int:
        """Characters at the end of the text that may begin a mark."""
        return max([held_back(self.text, mark, self.at) for mark in marks], default=0)

    def line(self, mark: str) -> Steps[str]:
        """Read a short text up to ``mark``, and the mark. Raises NotACall if it does not come soon."""
        while True:
            start, last = self.at, self.at + MAX_NAME + len(mark)
            place = self.text.find(mark, start, last)
            if place < 0 and len(self.text) > last:
                raise NotACall
            if place >= 0:
                self.at = place + len(mark)
                return self.text[start:place]
            yield from self.more()

    # -- what was read

    def begin(self) -> None:
        """What is read from here on may become content."""
        self.settle()
        if self._begun is None:
            self._begun = self.at

    def suppose(self, known: Callable[[str], bool]) -> None:
        """What follows may become content until a function that is ``known`` is called."""
        if self._begun is None:
            self.begin()
        self._known, self._supposed = known, Delta()

    def refuse(self) -> bool:
        """None was called: there are no calls. Returns whether there was one to another function."""
        if self._supposed is None:
            return False
        called, self.calls, self._supposed = self.calls > 0, 0, None
        return called

    @property
    def supposing(self) -> bool:
        """Whether what was read may still become content as :meth:`suppose` says."""
        return self._supposed is not None

    def settle(self) -> None:
        """What was read since :meth:`begin` is a call, or belongs to one."""
        if self._supposed is None:
            self._forget()

    def _forget(self) -> None:
        self._begun = None
        if self._kept_size:
            self._kept.clear()
            self._kept_size = 0

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
        return "" if self._begun is None else self._since_begin(len(self.text))

    def since_begin(self, *, less: int) -> str:
        """What was read since :meth:`begin`, without the last ``less`` characters."""
        return self._since_begin(self.at - less)

    def _since_begin(self, end: int) -> str:
        return "".join((*self._kept, self.text[self._begun : end]))

    def give_up(self) -> None:
        """What was read since :meth:`begin` is no call. White space after a call is read again."""
        self.refuse()
        if self._begun is None:
            return
        text = self._since_begin(self.at)
        if text.strip():
            self.delta.add_content(text)
            self.settle()
        else:
            self.back()

    def back(self) -> None:
        """What was read since :meth:`begin` is to be read again."""
        assert self._begun is not None
        self.at = self._begun
        if self._kept:
            assert not self.at, "it was kept when this text came"
            self.text = "".join((*self._kept, self.text))
            self._before -= self._kept_size
            self._places.clear()  # at most once for each piece
        self.settle()

    # -- where reasoning is

    def reason(self, *, less: int, at_least: int) -> None:
        """What was read since :meth:`begin` is reasoning, but for the last ``less`` characters, which are
        read again."""
        text = self._since_begin(self.at)
        count = max(len(text) - less, at_least)
        self.delta.add_reasoning(text[:count])
        self.back()
        self.at += count

    def turn(self) -> None:
        """Reasoning begins or ends here."""
        self._turns.append(self._before + self.at)

    def take_turns(self) -> tuple[list[int], int]:
        """The turns since the last call, and from where on there may be others."""
        turns, self._turns = self._turns, []
        if self._begun is None:
            return turns, self._before + self.at
        return turns, self._before + self._begun - self._kept_size

    # -- the delta

    def start_call(self, name: str, id: str | None = None) -> None:
        """A call begins. Raises NotACall if its function is none of the request's."""
        if self._may_call is not None and not self._may_call(name):
            raise NotACall
        if self._supposed is not None and self._known(name):
            self.delta.add(self._supposed)
            self._supposed = None
        self.settle()
        self._add_call(CallDelta(self.calls, name, "", id))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add_call(CallDelta(self.calls - 1, None, text))

    def _add_call(self, call: CallDelta) -> None:
        (self.delta if self._supposed is None else self._supposed).add_call(call)

    # -- content

    def content(self, marks: tuple[str, ...]) -> Steps[None]:
        """Read content up to one of ``marks``. White space before it, and the mark, are not content unless
        no call follows (:meth:`begin`). Without marks all that follows is content."""
        while True:
            end, mark = self.find(*marks)
            held = 0 if mark else self.held(marks)
            end -= held
            safe = self.at + len(self.text[self.at : end].rstrip()) if marks else end
            if safe > self.at:
                self._add_content(safe)
            if mark or safe < end:
                if self._begun is None:
                    self.begin()
                self.at = end
            if mark:
                return
            if self.ended:
                self._end_content(held)
            self.idle = not marks
            self.open = None if held or self._begun is not None else TextKind.CONTENT
            yield from self.more()

    def _add_content(self, end: int) -> None:
        """What was read since :meth:`begin`, and what follows up to ``end``, is content."""
        text = self.text[self.at : end] if self._begun is None else self._since_begin(end)
        self.delta.add_content(text)
        self.at = end
        self.settle()

    def _end_content(self, marker: int) -> None:
        """``marker``: characters of the beginning of a mark."""
        if self._begun is None:
            self.begin()
        text = self.undecided()
        self.at = len(self.text)
        self.settle()
        if (self.calls and not text.strip()) or (self.cut and marker >= MIN_MARKER):
            return
        self.delta.add_content(text)


class ReadingParser:
    """A parser (:class:`~penstock.generation.parsers.delta.TurnParser`) whose format a generator reads."""

    guard = ""

    def __init__(self, read: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = read(self._reader)
        next(self._steps)

    @property
    def idle(self) -> bool:
        return self._reader.idle

    @property
    def open(self) -> TextKind | None:
        return self._reader.open

    def push(self, text: str) -> Delta:
        return Delta(content=text) if self._reader.idle else self._reader.feed(text, self._steps)

    def take_turns(self) -> tuple[list[int], int]:
        return self._reader.take_turns()

    def finish(self, *, cut: bool) -> Delta:
        return self._reader.finish(self._steps, cut=cut)
