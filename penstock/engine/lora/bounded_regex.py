"""Regular expressions of files that nobody vouches for: matching them takes bounded time.

Python's own engine backtracks, so a pattern such as ``(a+)+$`` keeps it busy for ever. This one follows all
ways through the pattern at once (K. Thompson, Regular Expression Search Algorithm, 1968), and gives up when
its steps are used up. It knows what patterns of layers' names use: literals, ``.``, classes, ``\\d``,
``\\w``, ``\\s``, groups, ``|``, ``*``, ``+``, ``?``, ``{m,n}``, ``^`` and ``$``. For these it agrees with
Python's, on text without line ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

MAX_PATTERN_CHARS = 1000
MAX_STATES = 4000
MAX_DEPTH = 50
"""Groups within groups."""
STATE_STEPS = 32
"""Steps that a state costs where states are computed; where they are known, a character costs one."""

_Test: TypeAlias = Callable[[str], bool]
_States: TypeAlias = frozenset[int]

_CLASSES: dict[str, _Test] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
_REPEAT = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}")


class PatternError(ValueError):
    """A pattern that is not supported, or whose steps are used up."""


class StepBudget:
    """Steps that may be made; patterns that are matched for one purpose share it."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Raises PatternError when they are used up."""
        self._left -= steps
        if self._left < 0:
            raise PatternError("to match it takes too long")


class BoundedRegex:
    """A compiled pattern."""

    def __init__(self, pattern: str, budget: StepBudget) -> None:
        """Raises PatternError."""
        if len(pattern) > MAX_PATTERN_CHARS:
            raise PatternError(f"it has {len(pattern)} characters; the maximum is {MAX_PATTERN_CHARS}")
        self._budget = budget
        self._automaton = _Automaton()
        self._accepting = _parse(pattern)(self._automaton, 0)
        self._known: dict[tuple[_States, str], _States] = {}
        """States after a character, before the text's end."""

    def fullmatch(self, text: str) -> bool:
        """Whether the pattern matches the whole text. Raises PatternError."""
        states = self._closure((0,), at_start=True, at_end=not text)
        for index, char in enumerate(text):
            at_end = index == len(text) - 1
            self._budget.spend(1)
            after = None if at_end else self._known.get((states, char))
            if after is None:
                after = self._closure(self._automaton.targets(states, char), at_start=False, at_end=at_end)
                if not at_end:
                    self._known[states, char] = after
            if not after:
                return False
            states = after
        return self._accepting in states

    def _closure(self, states: Iterable[int], *, at_start: bool, at_end: bool) -> _States:
        """All states that are reached from ``states`` without a character."""
        found = self._automaton.closure(states, at_start=at_start, at_end=at_end)
        self._budget.spend((1 + len(found)) * STATE_STEPS)
        return found


@dataclass(slots=True, frozen=True)
class _Edge:
    """A way from one state to another that takes no character."""

    target: int
    at_start: bool = False
    """Whether it is open at the text's start only."""
    at_end: bool = False


class _Automaton:
    """States, and the ways between them. State 0 is the first one."""

    def __init__(self) -> None:
        self._edges: list[list[_Edge]] = [[]]
        self._tests: list[tuple[_Test, int] | None] = [None]
        """The character that leads on, and where to."""

    def new(self) -> int:
        """A further state. Raises PatternError."""
        if len(self._edges) == MAX_STATES:
            raise PatternError("it is too long, with its repetitions written out")
        self._edges.append([])
        self._tests.append(None)
        return len(self._edges) - 1

    def link(self, state: int, edge: _Edge) -> None:
        """Add a way."""
        self._edges[state].append(edge)

    def take(self, state: int, test: _Test) -> int:
        """A state that is reached from ``state`` by a character. Raises PatternError."""
        before, after = self.new(), self.new()
        self.link(state, _Edge(before))
        self._tests[before] = test, after
        return after

    def targets(self, states: _States, char: str) -> list[int]:
        """States that ``char`` leads to."""
        tests = [test for state in states if (test := self._tests[state]) is not None]
        return [target for accepts, target in tests if accepts(char)]

    def closure(self, states: Iterable[int], *, at_start: bool, at_end: bool) -> _States:
        """See :meth:`BoundedRegex._closure`."""
        found: set[int] = set()
        pending = list(states)
        while pending:
            state = pending.pop()
            if state not in found:
                found.add(state)
                pending += [
                    edge.target
                    for edge in self._edges[state]
                    if at_start >= edge.at_start and at_end >= edge.at_end
                ]
        return frozenset(found)


# -- from a pattern's text to states: a part of a pattern adds its own, and returns where they end

_Part: TypeAlias = Callable[[_Automaton, int], int]


def _char(test: _Test) -> _Part:
    return lambda automaton, state: automaton.take(state, test)


def _anchor(char: str) -> _Part:
    def build(automaton: _Automaton, state: int) -> int:
        after = automaton.new()
        automaton.link(state, _Edge(after, at_start=char == "^", at_end=char == "$"))
        return after

    return build


def _sequence(parts: list[_Part]) -> _Part:
    def build(automaton: _Automaton, state: int) -> int:
        for part in parts:
            state = part(automaton, state)
        return state

    return build


def _either(parts: list[_Part]) -> _Part:
    def build(automaton: _Automaton, state: int) -> int:
        after = automaton.new()
        for part in parts:
            automaton.link(part(automaton, state), _Edge(after))
        return after

    return build


def _repeat(part: _Part, least: int, most: int | None) -> _Part:
    def build(automaton: _Automaton, state: int) -> int:
        after = automaton.new()
        for count in range(least if most is None else most):
            if count >= least:
                automaton.link(state, _Edge(after))
            before = automaton.new()  # so that a repetition of nothing is bounded, too
            automaton.link(state, _Edge(before))
            state = part(automaton, before)
        if most is None:
            loop = automaton.new()
            automaton.link(state, _Edge(loop))
            automaton.link(part(automaton, loop), _Edge(loop))
            state = loop
        automaton.link(state, _Edge(after))
        return after

    return build


def _parse(pattern: str) -> _Part:
    """Raises PatternError."""
    parser = _Parser(pattern)
    part = parser.alternatives(0)
    if parser.rest:
        raise PatternError("it has a ) without its (")
    return part


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.rest = pattern

    def alternatives(self, depth: int) -> _Part:
        """Up to the end of the group."""
        if depth > MAX_DEPTH:
            raise PatternError(f"it has more than {MAX_DEPTH} groups within groups")
        branches = [self._branch(depth)]
        while self._skip("|"):
            branches.append(self._branch(depth))
        return branches[0] if len(branches) == 1 else _either(branches)

    def _branch(self, depth: int) -> _Part:
        parts = []
        while self.rest and self.rest[0] not in "|)":
            parts.append(self._quantified(self._atom(depth)))
        return _sequence(parts)

    def _atom(self, depth: int) -> _Part:
        char = self._take()
        if char == "(":
            if self.rest.startswith("?") and not self._skip("?:"):
                raise PatternError(f"'({self.rest[:2]}' is not supported")
            part = self.alternatives(depth + 1)
            if not self._skip(")"):
                raise PatternError("it has a ( without its )")
            return part
        if char in "^$":
            return _anchor(char)
        if char == ".":
            return _char(lambda _: True)
        if char == "[":
            return _char(self._class())
        if char in "*+?{":
            raise PatternError(f"{char!r} has nothing to repeat")
        return _char(self._escape() if char == "\\" else char.__eq__)

    def _quantified(self, part: _Part) -> _Part:
        most: int | None
        if self._skip("*"):
            part = _repeat(part, 0, None)
        elif self._skip("+"):
            part = _repeat(part, 1, None)
        elif self._skip("?"):
            part = _repeat(part, 0, 1)
        elif match := _REPEAT.match(self.rest):
            self.rest = self.rest[match.end() :]
            least = int(match[1])
            most = int(match[3]) if match[3] else None if match[2] else least
            if (most is not None and most < least) or (match[3] and not match[2]):
                raise PatternError(f"{match[0]!r} is no number of repetitions")
            part = _repeat(part, least, most)
        else:
            return part
        self._skip("?")  # as few as possible: whether the pattern matches does not depend on it
        if self.rest[:1] in tuple("*+?{"):
            raise PatternError(f"{self.rest[0]!r} follows a repetition")
        return part

    def _escape(self) -> _Test:
        char = self._take()
        if char.lower() in _CLASSES:
            test = _CLASSES[char.lower()]
            return test if char.islower() else lambda other: not test(other)
        if char.isalnum():
            raise PatternError(f"'\\{char}' is not supported")
        return char.__eq__

    def _class(self) -> _Test:
        """What follows a ``[``."""
        negated = self._skip("^")
        tests: list[_Test] = []
        while not (self._skip("]") if tests else False):
            char = self._take()
            test = self._escape() if char == "\\" else char.__eq__
            if len(self.rest) > 1 and self.rest[0] == "-" and self.rest[1] != "]":
                last = self.rest[1]
                if char in "\\[" or last in "\\[" or last < char:
                    raise PatternError(f"'{char}-{last}' is not supported")
                self.rest = self.rest[2:]
                test = _between(char, last)
            tests.append(test)
        return lambda char: any(test(char) for test in tests) != negated

    def _take(self) -> str:
        if not self.rest:
            raise PatternError("it ends too early")
        char, self.rest = self.rest[0], self.rest[1:]
        return char

    def _skip(self, text: str) -> bool:
        found = self.rest.startswith(text)
        if found:
            self.rest = self.rest.removeprefix(text)
        return found


def _between(first: str, last: str) -> _Test:
    return lambda char: first <= char <= last
