"""Reads arguments that a model writes as a JSON object, or as Python's literals, and emits JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.generation.parsers.escapes import without_halves
from penstock.generation.parsers.reader import MIN_MARKER, EndOfOutput, NotACall, Reader, Steps
from penstock.generation.parsers.value_types import ValueType, escaped, json_value

MAX_DEPTH = 64
"""Maximum nesting of Python's lists and dictionaries in arguments."""
MAX_WORD = 1024
"""Maximum characters of a number or word."""
_WORD_END = re.compile(r"[,)\]}:=\s]")
_SPACES = re.compile(r"\s*")
_RAW_END = re.compile(r"[,\]}]")
_STRING_END = re.compile(r'["\\]')
_BRACKET = re.compile(r'["{}\[\]]')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_STARTS = frozenset("'\"[({")
_STRING_ENDS = frozenset(",)]}")
"""What may follow a string. After a quote all else shows that it is text: models leave out escapes."""


class Nesting:
    """Finds the end of an object or array in text that arrives in pieces; checks only brackets and
    strings."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = self._quoted = False

    @property
    def ended(self) -> bool:
        """Whether its last bracket was read, once the first one was."""
        return self._depth == 0

    @property
    def quoted(self) -> bool:
        """Whether this is within a string."""
        return self._quoted

    def read(self, text: str, at: int, end: int | None = None) -> int:
        """Read on at ``at``, at first at the first bracket, up to ``end`` or the text's. Returns that, or
        where the value ends."""
        end = len(text) if end is None else end
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_STRING_END if self._quoted else _BRACKET).search(text, at, end)
            if found is None:
                return end
            at = found.end()
            match found[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    self._escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return at
        return at


def read_json_object(
    reader: Reader, end: str = "", *, emit: Callable[[str], object] | None = None
) -> Steps[None]:
    """Read an object as it is, up to its end or, outside its strings, ``end``, which is not read; only
    brackets and strings are checked. The next character is the object's first. ``emit`` gets its text; by
    default it is of the last call's arguments."""
    emit = emit or reader.arguments
    nesting = Nesting()
    marks = (end,) if end else ()
    while True:
        start = reader.at
        limit, mark = reader.find(*marks)
        held = 0 if mark else reader.held(marks)
        if not reader.ended or (reader.cut and held >= MIN_MARKER):
            limit -= held
        reader.at = nesting.read(reader.text, start, limit)
        if mark and nesting.quoted:
            reader.at = nesting.read(reader.text, limit, limit + len(mark))
        if reader.at > start:
            emit(reader.text[start : reader.at])
        if nesting.ended or (mark and reader.at == limit):
            return
        if not mark:
            yield from reader.more()


@contextmanager
def closed(reader: Reader, emit: Callable[[str], object], closing: str) -> Iterator[None]:
    """Emit ``closing`` after what is read within, even if that ends early; not if max_tokens cut it."""
    try:
        yield
    except (NotACall, EndOfOutput):
        if not reader.cut:
            emit(closing)
        raise
    emit(closing)


def read_python(
    reader: Reader,
    emit: Callable[[str], object],
    type: ValueType = ValueType.JSON,
    *,
    quote: str = "",
    depth: int = 0,
    key: bool = False,
) -> Steps[None]:
    """Read one of Python's literals. Raises NotACall for text that is none.

    ``type``: of a word. ``quote``: delimits strings, in which nothing is escaped; keys and words have no
    quotes then. ``key``: whether a colon may follow.
    """
    word = ""
    try:
        char = yield from reader.space()
        raw = bool(quote) and char == quote[0] and bool((yield from reader.either(quote)))
        if char in _CLOSING and depth == MAX_DEPTH:
            raise NotACall
        if not raw and char not in _STARTS:
            word = yield from _word(reader, raw=bool(quote))
    except (NotACall, EndOfOutput):
        if not reader.cut:
            emit("null")
        raise
    if raw:
        yield from _raw_string(reader, quote, emit)
    elif char not in _STARTS:
        emit(json_value(word, type))
    elif char in _CLOSING:
        reader.skip(1)
        yield from _items(reader, char, emit, quote, depth + 1)
    else:
        reader.skip(1)
        yield from _string(reader, char, emit, key=key)


def _string(reader: Reader, quote: str, emit: Callable[[str], object], *, key: bool) -> Steps[None]:
    def add(text: str) -> None:
        if text:
            emit(escaped(text))

    emit('"')
    with closed(reader, emit, '"'):
        while True:
            if (yield from reader.until(quote, "\\", emit=add)) == quote:
                space = yield from _space_in_string(reader, key=key)
                if space is None:
                    return
                add(quote + space)
                continue
            char = yield from reader.characters(1)
            digits = _HEX_DIGITS.get(char)
            if digits is None:
                add(_ESCAPES.get(char, char if char in "'\"\\" else f"\\{char}"))
                continue
            add((yield from _character(reader, char, digits)))


def _space_in_string(reader: Reader, *, key: bool) -> Steps[str | None]:
    """Read white space after a quote in a string; None if the quote ends the string."""
    held: list[str] = []
    while True:
        found = _SPACES.match(reader.text, reader.at)
        assert found is not None
        held.append(found[0])
        reader.at = found.end()
        following = reader.ahead(1)
        if following:
            return None if following in _STRING_ENDS or (key and following == ":") else "".join(held)
        if reader.ended and not reader.cut:
            return None
        yield from reader.more()


def _raw_string(reader: Reader, quote: str, emit: Callable[[str], object]) -> Steps[None]:
    emit('"')
    with closed(reader, emit, '"'):
        yield from reader.until(quote, emit=lambda text: emit(escaped(text)))


def _character(reader: Reader, char: str, digits: int) -> Steps[str]:
    """The character that an escape with hexadecimal digits stands for, or the escape if there is none."""
    code = yield from reader.characters(digits)
    try:
        value = chr(int(code, 16))
    except (ValueError, OverflowError):
        return f"\\{char}{code}"
    # A pair is JSON's way to write other characters.
    while "\ud800" <= value[-1] <= "\udbff" and (yield from reader.either("\\u")):
        code = yield from reader.characters(_HEX_DIGITS["u"])
        try:
            value += chr(int(code, 16))
        except ValueError:
            value += f"\\u{code}"
    return without_halves(value)


def _items(
    reader: Reader, bracket: str, emit: Callable[[str], object], quote: str, depth: int
) -> Steps[None]:
    """The items of a list, tuple, dictionary or set, whose opening bracket was read."""
    end, named, key, more = _CLOSING[bracket], bracket == "{", "", False
    try:
        if named and (yield from reader.space()) != end:
            key, named = yield from read_key(reader, quote, depth)
    except (NotACall, EndOfOutput):
        if not reader.cut:
            emit("{}")
        raise
    emit("{" if named else "[")
    with closed(reader, emit, "}" if named else "]"):
        while key or (yield from reader.space()) != end:
            if more:
                yield from reader.expect(",")
                if (yield from reader.space()) == end:
                    break
                emit(", ")
                if named:
                    key, _ = yield from read_key(reader, quote, depth)
            emit(f"{key}: " if named else key)
            if named or not key:
                yield from read_python(reader, emit, quote=quote, depth=depth)
            key, more = "", True
        reader.skip(1)


def read_key(reader: Reader, quote: str, depth: int = 0) -> Steps[tuple[str, bool]]:
    """Read a dictionary's key as a JSON string, and the colon after it; or the first item of a set, as JSON,
    and False. ``quote``: see :func:`read_python`."""
    held: list[str] = []
    if quote and not ((yield from reader.space()) == quote[0] and (yield from reader.either(quote))):
        return json_value((yield from reader.line(":")).strip(), ValueType.STRING), True
    if quote:
        yield from _raw_string(reader, quote, held.append)
    else:
        yield from read_python(reader, held.append, depth=depth, key=True)
    key = "".join(held)
    if (yield from reader.space()) != ":":
        return key, False
    if key[0] in "[{":
        raise NotACall
    reader.skip(1)
    return key if key[0] == '"' else f'"{key}"', True


def _word(reader: Reader, *, raw: bool) -> Steps[str]:
    """A number, or a name such as True. ``raw``: any text, to the next item's."""
    while True:
        start = reader.at
        found = (_RAW_END if raw else _WORD_END).search(reader.text, start, start + MAX_WORD + 1)
        end = found.start() if found else len(reader.text)
        if (found and end == start and not raw) or end - start > MAX_WORD:
            raise NotACall
        if found:
            reader.at = end
            return reader.text[start:end]
        yield from reader.more()
