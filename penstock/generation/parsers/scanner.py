"""Incremental scanner of one tool call's JSON object: ``{"name": "f", "arguments": {"x": 1}}``."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\r\n"
ARGUMENTS = frozenset(("arguments", "parameters"))
"""Keys under which models write a call's arguments."""


_STRING_END = re.compile(r'["\\]')


class _State(Enum):
    START = auto()
    KEY = auto()  # before a key, or the object's end
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_STRING = auto()
    IN_NESTED = auto()
    IN_SCALAR = auto()
    DONE = auto()
    BROKEN = auto()


class CallScanner:
    """Scans one object. Once the name is known, arguments that are an object are returned as they arrive;
    only their brackets and strings are checked."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.started = False
        """Whether this is a call: it has a name, and its arguments have begun."""
        self._state = _State.START
        self._key = ""
        self._value = ""
        self._escaped = False
        self._quoted = False
        self._depth = 0
        self._ready = ""
        self._has_arguments = False

    @property
    def done(self) -> bool:
        """Whether the object's closing brace was read."""
        return self._state is _State.DONE

    @property
    def broken(self) -> bool:
        """Whether the text is no such object; the first wrong character was not read."""
        return self._state is _State.BROKEN

    def push(self, text: str) -> str:
        """Read on. Returns the rest of ``text`` if the object is done or broken, otherwise nothing."""
        place, end = 0, len(text)
        while place < end:
            if self._quoted and self._state is _State.IN_NESTED and not self._escaped:
                place = self._skip_string(text, place)
                if place == end:
                    break
            self._read(text[place])
            if self._state is _State.BROKEN:
                return text[place:]
            place += 1
            if self._state is _State.DONE:
                return text[place:]
        return ""

    def _skip_string(self, text: str, place: int) -> int:
        """Read on within a nested string, up to what may end it."""
        found = _STRING_END.search(text, place)
        end = len(text) if found is None else found.start()
        if self._key in ARGUMENTS:
            self._ready += text[place:end]
        return end

    def take_arguments(self) -> str:
        """The text of the arguments since the last call."""
        if not self.started:
            return ""
        ready, self._ready = self._ready, ""
        return ready

    # -- one character

    def _read(self, char: str) -> None:
        match self._state:
            case _State.IN_NESTED:
                self._read_nested(char)
            case _State.IN_STRING | _State.IN_KEY:
                self._read_string(char)
            case _State.IN_SCALAR if char not in ",}" + _SPACE:
                self._value += char
            case _State.IN_SCALAR:
                self._end_value()
                if not self.broken:
                    self._read(char)
            case _ if char in _SPACE:
                pass
            case _State.START:
                self._state = _State.KEY if char == "{" else _State.BROKEN
            case _State.KEY:
                self._read_before_key(char)
            case _State.COLON:
                self._state = _State.VALUE if char == ":" else _State.BROKEN
            case _State.VALUE:
                self._begin_value(char)

    def _read_before_key(self, char: str) -> None:
        if char == '"':
            self._state, self._value = _State.IN_KEY, char
        elif char == "}":
            self._state = _State.DONE
        elif char != ",":
            self._state = _State.BROKEN

    def _read_string(self, char: str) -> None:
        self._value += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"' and self._state is _State.IN_KEY:
            self._key = _decoded(self._value) or ""
            self._state = _State.COLON
        elif char == '"':
            self._end_value()

    def _begin_value(self, char: str) -> None:
        if (self._has_arguments and self._key in ARGUMENTS) or (self.name and self._key == "name"):
            self._key = ""  # a repeated key: the first one's value may be sent already
        if self._key in ARGUMENTS:
            self._has_arguments = True
            self.started = self.name is not None
        self._value = ""
        if char in "{[":
            self._state, self._depth, self._quoted = _State.IN_NESTED, 0, False
            self._read_nested(char)
        elif char == '"':
            self._state, self._value = _State.IN_STRING, char
        elif char in ",:}]":
            self._state = _State.BROKEN
        else:
            self._state, self._value = _State.IN_SCALAR, char

    def _read_nested(self, char: str) -> None:
        if self._key in ARGUMENTS:
            self._ready += char
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = char == "\\"
            self._quoted = char != '"'
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _end_value(self) -> None:
        nested = self._state is _State.IN_NESTED
        self._state = _State.KEY
        if self._key == "name":
            self.name = None if nested else _decoded(self._value)
            if not self.name:
                self._state = _State.BROKEN
            elif self._ready:  # the arguments came first
                self.started = True
        elif self._key in ARGUMENTS and not nested:
            # Some models write the object as a string, and null for no arguments.
            text = _decoded(self._value)
            self._ready = text if text is not None else "{}" if self._value == "null" else self._value
            self.started = self.name is not None


def _decoded(literal: str) -> str | None:
    """The value of a JSON string literal; None for anything else."""
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
