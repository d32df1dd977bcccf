"""Reads arguments that a model writes as a JSON object, or as Python's literals, and emits JSON."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.generation.parsers.reader import NotACall, Reader, Steps
from penstock.generation.parsers.value_types import escaped, json_value

MAX_DEPTH = 64
"""Maximum nesting of Python's lists and dictionaries in arguments."""
MAX_WORD = 1024
"""Maximum characters of a number or word."""
_STRING_END = re.compile(r'["\\]')
_WORD_END = re.compile(r"[,)\]}:=\s]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_json_object(reader: Reader) -> Steps[None]:
    """Read the arguments of the last call as they are, up to the object's end; only brackets and strings are
    checked. The next character is the object's first."""
    depth = 0
    quoted = escape = False
    while True:
        text, place, ended = reader.unread, 0, False
        while place < len(text) and not ended:
            if quoted and not escape:
                found = _STRING_END.search(text, place)
                if found is None:
                    break
                place = found.start()
            char = text[place]
            place += 1
            if escape:
                escape = False
            elif quoted:
                escape = char == "\\"
                quoted = char != '"'
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                ended = depth == 0
        read = text[:place] if ended else text
        if read:
            reader.arguments(read)
            reader.skip(len(read))
        if ended:
            return
        yield from reader.more()


def read_python(reader: Reader, emit: Callable[[str], object], depth: int = 0) -> Steps[None]:
    """Read one of Python's literals. Raises NotACall for text that is none."""
    char = yield from reader.space()
    if char in "'\"":
        reader.skip(1)
        yield from _string(reader, char, emit)
    elif char in _CLOSING:
        if depth == MAX_DEPTH:
            raise NotACall
        reader.skip(1)
        yield from _items(reader, char, emit, depth + 1)
    else:
        emit(json_value((yield from _word(reader))))


def _string(reader: Reader, quote: str, emit: Callable[[str], object]) -> Steps[None]:
    def add(text: str) -> None:
        if text:
            emit(escaped(text))

    emit('"')
    while (yield from reader.until(quote, "\\", emit=add)) == "\\":
        char = yield from reader.characters(1)
        digits = _HEX_DIGITS.get(char)
        if digits is None:
            add(_ESCAPES.get(char, char if char in "'\"\\" else f"\\{char}"))
            continue
        code = yield from reader.characters(digits)
        try:
            add(chr(int(code, 16)).encode("utf-8", "replace").decode())
        except (ValueError, OverflowError):
            add(f"\\{char}{code}")
    emit('"')


def _items(reader: Reader, bracket: str, emit: Callable[[str], object], depth: int) -> Steps[None]:
    """The items of a list, tuple or dictionary, whose opening bracket was read."""
    named = bracket == "{"
    emit("{" if named else "[")
    first = True
    while (yield from reader.space()) != _CLOSING[bracket]:
        if not first:
            yield from reader.expect(",")
            if (yield from reader.space()) == _CLOSING[bracket]:
                break
            emit(", ")
        first = False
        if named:
            if (yield from reader.space()) not in "'\"":
                raise NotACall
            yield from read_python(reader, emit, depth)
            yield from reader.space()
            yield from reader.expect(":")
            emit(": ")
        yield from read_python(reader, emit, depth)
    reader.skip(1)
    emit("}" if named else "]")


def _word(reader: Reader) -> Steps[str]:
    """A number, or a name such as True."""
    while True:
        text = reader.unread
        end = _WORD_END.search(text)
        if (end and not end.start()) or (end.start() if end else len(text)) > MAX_WORD:
            raise NotACall
        if end:
            reader.skip(end.start())
            return text[: end.start()]
        yield from reader.more()
