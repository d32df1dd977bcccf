"""Reads a tool call that is a JSON object: ``{"name": "f", "arguments": {"x": 1}}``."""

from __future__ import annotations

import re

from penstock.generation.parsers.escapes import decoded_literal
from penstock.generation.parsers.literals import read_json_object
from penstock.generation.parsers.reader import NotACall, Reader, Steps
from penstock.generation.parsers.value_types import Parameters

NAMES = frozenset(("name", "tool_name"))
"""Keys under which models write a call's name."""
ARGUMENTS = frozenset(("arguments", "parameters"))
"""Keys under which models write a call's arguments."""

_SCALAR_END = re.compile(r"[,}\s]")


class _Call:
    """What was read of one object."""

    def __init__(self, reader: Reader, parameters: Parameters) -> None:
        self._reader = reader
        self._parameters = parameters
        self._held: list[str] = []
        """Arguments that came before the name."""
        self.name: str | None = None
        self.has_arguments = False
        """Whether the arguments have begun."""
        self.started = False
        """Whether this is a call: it has a name, and its arguments have begun."""

    def start(self) -> None:
        """Start the call, once its name is known."""
        if self.name is not None and not self.started:
            self._reader.start_call(self._parameters.meant(self.name))
            self.started = True
            for text in self._held:
                self._reader.arguments(text)

    def add(self, text: str) -> None:
        """Add to the arguments."""
        if self.started:
            self._reader.arguments(text)
        else:
            self._held.append(text)


def read_json_call(reader: Reader, parameters: Parameters, *, bare: bool) -> Steps[None]:
    """Read one object. Arguments that are an object are passed on as they arrive; only their brackets and
    strings are checked. ``bare``: only its fields show that it is a call, so it must have arguments. Raises
    NotACall."""
    call = _Call(reader, parameters)
    try:
        yield from _fields(reader, call)
    except NotACall:  # a brace may be missing
        if not call.started:
            raise
    if not call.started:
        if call.name is None or bare:
            raise NotACall
        call.start()
        call.add("{}")
    reader.begin()


def _fields(reader: Reader, call: _Call) -> Steps[None]:
    yield from reader.space()
    yield from reader.expect("{")
    while (char := (yield from reader.space())) != "}":
        if char == ",":
            reader.skip(1)
            continue
        key = decoded_literal((yield from _literal(reader, '"'))) or ""
        yield from reader.space()
        yield from reader.expect(":")
        # Of a repeated key the first value may be sent already.
        if key in ARGUMENTS and not call.has_arguments:
            yield from _arguments(reader, call)
        elif key in NAMES and call.name is None:
            call.name = decoded_literal((yield from _value(reader))) or None
            if call.name is None:
                raise NotACall
            if call.has_arguments:
                call.start()
        else:
            yield from _value(reader)
    reader.skip(1)


def _arguments(reader: Reader, call: _Call) -> Steps[None]:
    char = yield from reader.space()
    call.has_arguments = True
    call.start()
    if char in "{[":
        yield from read_json_object(reader, emit=call.add)
        return
    # Some models write the object as a string, and null or an empty string for no arguments.
    literal = yield from _literal(reader, char)
    text = decoded_literal(literal)
    text = literal if text is None else text
    call.add("{}" if text.strip() in ("", "null") else text)


def _value(reader: Reader) -> Steps[str]:
    """Read a value. Returns its text; of an object or array none."""
    char = yield from reader.space()
    if char in "{[":
        yield from read_json_object(reader, emit=len)
        return ""
    return (yield from _literal(reader, char))


def _literal(reader: Reader, char: str) -> Steps[str]:
    """Read a string or another literal, whose first character is ``char``."""
    read: list[str] = []
    if char == '"':
        yield from reader.expect('"')
        yield from reader.string(read.append)
        return f'"{"".join(read)}"'
    if char in ",:}]{[":
        raise NotACall
    while True:
        found = _SCALAR_END.search(reader.text, reader.at)
        end = found.start() if found else len(reader.text)
        read.append(reader.text[reader.at : end])
        reader.at = end
        if found:
            return "".join(read)
        yield from reader.more()
