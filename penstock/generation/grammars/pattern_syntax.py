"""Reads a regular expression of ECMAScript, the dialect of JSON Schema's ``pattern``, into its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

WORD = "0-9A-Za-z_"
ANYTHING = r"[\s\S]"
ANY_OF_LINE = r"[^\n\r\x{2028}\x{2029}]"
_SPACE = r"\t-\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
"""What is white space to ECMAScript as well as to Python, where they differ."""
_ODD_SPACE = r"\x{1C}-\x{1F}\x{85}\x{FEFF}"
"""What is white space to one of them."""
_CLASSES = {
    "d": "0-9",
    "D": "^0-9",
    "w": WORD,
    "W": f"^{WORD}",
    "s": _SPACE,
    "S": f"^{_SPACE}{_ODD_SPACE}",
}
_COMPLEMENTS = [{f"[{_CLASSES[each]}]", f"[{_CLASSES[each.upper()]}]"} for each in "dws"]
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0C", "v": r"\x0B", "0": r"\x00"}
_ESCAPED = re.compile(
    r"""\\(?:
    u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
    |u\{(?P<long>[0-9a-fA-F]{1,6})\}|u(?P<unit>[0-9a-fA-F]{4})|x(?P<byte>[0-9a-fA-F]{2})
    |c(?P<control>[A-Za-z])|(?P<property>[pP]\{[\w=]+\})
    |(?P<reference>[1-9]\d*|k<\w+>)|(?P<octal>0[0-9]+)|(?P<other>.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_QUANTIFIER = re.compile(r"([*+?]|\{(\d+)(,(\d*))?\})[?]?")
_OPENING = re.compile(r"\((?:\?(?P<kind>:|=|!|<=|<!|P?<\w+>))?")
MAX_DEPTH = 100
"""Groups within one another."""


class Unenforceable(ValueError):
    """The pattern has what no grammar can have; the message says what, and where."""


class Char(NamedTuple):
    """One character."""

    text: str
    """As a regular expression that may stand in a class."""
    word: bool | None
    """Whether it is one of ``\\w``; None: it may be."""


class Edge(NamedTuple):
    """An assertion: ``^``, ``$``, ``b`` or ``B``."""

    kind: str
    at: int


class Group(NamedTuple):
    alternatives: list[Sequence]
    look: str = ""
    """``=``, ``!``, ``<=`` or ``<!`` for look-around."""
    at: int = 0


class RepeatedPart(NamedTuple):
    """A part and how often it is repeated."""

    part: Char | Edge | Group
    least: int = 1
    most: int | None = 1


Sequence: TypeAlias = list[RepeatedPart]


def parsed(pattern: str) -> list[Sequence]:
    """The alternatives of ``pattern``. Raises Unenforceable."""
    reader = _Reader(pattern)
    alternatives = reader.alternatives(0)
    if reader.at < len(pattern):
        raise Unenforceable(f"the parenthesis at character {reader.at} closes nothing")
    return alternatives


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> list[Sequence]:
        if depth > MAX_DEPTH:
            raise Unenforceable("its groups are nested too deeply")
        found = [list(self._sequence(depth))]
        while self._pattern.startswith("|", self.at):
            self.at += 1
            found.append(list(self._sequence(depth)))
        return found

    def _sequence(self, depth: int) -> Iterator[RepeatedPart]:
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            start = self.at
            part = self._part(depth)
            repeated = _QUANTIFIER.match(self._pattern, self.at)
            if repeated is None:
                yield RepeatedPart(part)
                continue
            if isinstance(part, Edge) or (isinstance(part, Group) and part.look):
                raise Unenforceable(f"the assertion at character {start} is repeated")
            self.at = repeated.end()
            if _QUANTIFIER.match(self._pattern, self.at):
                raise Unenforceable(f"the repetition at character {self.at} repeats nothing")
            yield RepeatedPart(part, *_times(repeated))

    def _part(self, depth: int) -> Char | Edge | Group:
        start, char = self.at, self._pattern[self.at]
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        self.at += 1
        if char in "^$":
            return Edge(char, start)
        if char == ".":
            return Char(ANY_OF_LINE, None)
        if char in "*+?":
            raise Unenforceable(f"the '{char}' at character {start} repeats nothing")
        return _literal(char)

    def _group(self, depth: int) -> Group:
        start = self.at
        opening = _OPENING.match(self._pattern, start)
        assert opening is not None
        self.at = opening.end()
        kind = opening["kind"] or ""
        if not kind and self._pattern.startswith("?", self.at):
            raise Unenforceable(f"the group at character {start} is of an unknown kind")
        alternatives = self.alternatives(depth + 1)
        if not self._pattern.startswith(")", self.at):
            raise Unenforceable(f"the group at character {start} is not closed")
        self.at += 1
        return Group(alternatives, kind if kind in ("=", "!", "<=", "<!") else "", start)

    def _escape(self) -> Char | Edge:
        start = self.at
        match = self._escaped()
        other = match["other"]
        if other is not None and other in "bB":
            return Edge(other, start)
        return self._char_of(match, start)

    def _escaped(self) -> re.Match[str]:
        match = _ESCAPED.match(self._pattern, self.at)
        if match is None:
            raise Unenforceable(f"the backslash at character {self.at} escapes nothing")
        self.at = match.end()
        return match

    def _char_of(self, match: re.Match[str], start: int) -> Char:
        if match["reference"]:
            raise Unenforceable(f"the back reference at character {start}")
        if match["octal"]:
            raise Unenforceable(f"the octal escape '\\{match['octal'][:3]}' at character {start}")
        if match["high"]:
            high, low = int(match["high"], 16) - 0xD800, int(match["low"], 16) - 0xDC00
            return _literal(chr(0x10000 + (high << 10) + low))
        digits = match["long"] or match["unit"] or match["byte"]
        if digits:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise Unenforceable(f"the escape at character {start} is no character")
            return _literal(chr(code))
        if match["control"]:
            return _literal(chr(ord(match["control"]) % 32))
        if match["property"]:
            return Char(f"\\{match['property']}", None)
        other = match["other"]
        if other in _CLASSES:
            return Char(f"[{_CLASSES[other]}]", {"w": True, "d": True, "W": False, "s": False}.get(other))
        if other in _CONTROLS:
            return Char(_CONTROLS[other], word=False)
        if other.isascii() and other.isalnum():
            raise Unenforceable(f"the escape '\\{other}' at character {start} is unknown")
        return _literal(other)

    def _class(self) -> Char:
        start = self.at
        self.at += 1
        negated = self._pattern.startswith("^", self.at)
        self.at += negated
        kinds: set[bool | None] = set()
        members: list[str] = []
        while not self._pattern.startswith("]", self.at):
            if self.at >= len(self._pattern):
                raise Unenforceable(f"the class at character {start} is not closed")
            members.append(self._member(kinds, negated=negated))
        self.at += 1
        if not members and not negated:
            raise Unenforceable(f"the class at character {start} is empty")
        if not members:
            return Char(ANYTHING, None)
        if not negated and any(pair <= set(members) for pair in _COMPLEMENTS):
            return Char(ANYTHING, None)
        text = "".join(members)
        if negated and f"[{_SPACE}]" in members:
            text += _ODD_SPACE
        word = kinds.pop() if len(kinds) == 1 else None
        return Char(f"[{'^' if negated else ''}{text}]", word if not negated or word is None else None)

    def _member(self, kinds: set[bool | None], *, negated: bool) -> str:
        start = self.at
        first = self._class_char()
        if negated and first.text == f"[{_CLASSES['S']}]":
            return f"[^{_SPACE}]"
        dash = self._pattern.startswith("-", self.at) and not self._pattern.startswith("-]", self.at)
        if not dash or first.text.startswith("["):
            kinds.add(first.word)
            return first.text
        before = self.at
        self.at += 1
        last = self._class_char()
        if last.text.startswith(("[", r"\p", r"\P")) or first.text.startswith((r"\p", r"\P")):
            self.at = before
            kinds.add(first.word)
            return first.text
        if not first.word or not last.word or first.text[0].isdigit() != last.text[0].isdigit():
            kinds.add(None)
        else:
            kinds.add(True if first.text.isupper() == last.text.isupper() else None)
        if _code(first.text) > _code(last.text):
            raise Unenforceable(f"the range at character {start} is empty")
        return f"{first.text}-{last.text}"

    def _class_char(self) -> Char:
        if self.at >= len(self._pattern):
            raise Unenforceable("its last class is not closed")
        if self._pattern[self.at] != "\\":
            self.at += 1
            return _literal(self._pattern[self.at - 1])
        start = self.at
        match = self._escaped()
        return _literal("\b") if match["other"] == "b" else self._char_of(match, start)


def _literal(char: str) -> Char:
    word = char.isascii() and (char.isalnum() or char == "_")
    if word:
        return Char(char, word=True)
    if ord(char) < 32 or ord(char) == 127 or not char.isascii():
        return Char(f"\\x{{{ord(char):X}}}", word=False)
    return Char(" " if char == " " else f"\\x{ord(char):02X}", word=False)


def _code(text: str) -> int:
    if text.startswith("\\x{"):
        return int(text[3:-1], 16)
    if text.startswith("\\x"):
        return int(text[2:], 16)
    return {r"\t": 9, r"\n": 10, r"\r": 13}.get(text, ord(text[0]))


def _times(match: re.Match[str]) -> tuple[int, int | None]:
    if match[1] in "*+?":
        return (1 if match[1] == "+" else 0), (1 if match[1] == "?" else None)
    least = int(match[2])
    return least, least if match[3] is None else int(match[4]) if match[4] else None
