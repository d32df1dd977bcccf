"""Reads arguments that a model writes as a JSON object, or as Python's literals, and emits JSON."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.generation.parsers.escapes import without_halves
from penstock.generation.parsers.reader import NotACall, Reader, Steps
from penstock.generation.parsers.scanner import Nesting
from penstock.generation.parsers.value_types import escaped, json_value

MAX_DEPTH = 64
"""Maximum nesting of Python's lists and dictionaries in arguments."""
MAX_WORD = 1024
"""Maximum characters of a number or word."""
_WORD_END = re.compile(r"[,)\]}:=\s]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_json_object(reader: Reader) -> Steps[None]:
    """Read the arguments of the last call as they are, up to the object's end; only brackets and strings are
    checked. The next character is the object's first."""
    nesting = Nesting()
    while True:
        start = reader.at
        reader.at = nesting.read(reader.text, start)
        if reader.at > start:
            reader.arguments(reader.text[start : reader.at])
        if nesting.ended:
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
        add((yield from _character(reader, char, digits)))
    emit('"')


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
        start = reader.at
        found = _WORD_END.search(reader.text, start, start + MAX_WORD + 1)
        end = found.start() if found else len(reader.text)
        if (found and end == start) or end - start > MAX_WORD:
            raise NotACall
        if found:
            reader.at = end
            return reader.text[start:end]
        yield from reader.more()
