"""Incremental scanner of one tool call's JSON object: ``{"name": "f", "arguments": {"x": 1}}``."""

from __future__ import annotations

import re
from enum import Enum, auto

from penstock.generation.parsers.escapes import decoded_literal

_SPACE = " \t\r\n"
NAMES = frozenset(("name", "tool_name"))
"""Keys under which models write a call's name."""
ARGUMENTS = frozenset(("arguments", "parameters"))
"""Keys under which models write a call's arguments."""

_STRING_END = re.compile(r'["\\]')
_BRACKET = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(rf"[,}}{_SPACE}]")
_SPACE_END = re.compile(rf"[^{_SPACE}]")


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
        self._value: list[str] = []
        """What was read of the present key or value, if it matters."""
        self._escaped = False
        self._nesting = Nesting()
        self._ready: list[str] = []
        self._has_arguments = False

    @property
    def done(self) -> bool:
        """Whether the object's closing brace was read."""
        return self._state is _State.DONE

    @property
    def broken(self) -> bool:
        """Whether the text is no such object; the first wrong character was not read."""
        return self._state is _State.BROKEN

    def read(self, text: str, at: int) -> int:
        """Read on at ``at``. Returns where the object is done or broken, otherwise the end of ``text``."""
        end = len(text)
        while at < end and self._state not in (_State.DONE, _State.BROKEN):
            match self._state:
                case _State.IN_NESTED:
                    at = self._read_nested(text, at)
                case _State.IN_STRING | _State.IN_KEY:
                    at = self._read_string(text, at)
                case _State.IN_SCALAR:
                    at = self._read_scalar(text, at)
                case _:
                    found = _SPACE_END.search(text, at)
                    if found is None:
                        return end
                    at = found.start()
                    self._read_mark(found[0])
                    at += not self.broken
        return at

    def take_arguments(self) -> str:
        """The text of the arguments since the last call."""
        if not self.started:
            return ""
        ready = "".join(self._ready)
        self._ready.clear()
        return ready

    # -- what stands between keys and values

    def _read_mark(self, char: str) -> None:
        match self._state:
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
            self._state, self._value = _State.IN_KEY, [char]
        elif char == "}":
            self._state = _State.DONE
        elif char != ",":
            self._state = _State.BROKEN

    def _begin_value(self, char: str) -> None:
        if (self._has_arguments and self._key in ARGUMENTS) or (self.name and self._key in NAMES):
            self._key = ""  # a repeated key: the first one's value may be sent already
        if self._key in ARGUMENTS:
            self._has_arguments = True
            self.started = self.name is not None
        self._value = [char]
        if char in "{[":
            self._state, self._nesting = _State.IN_NESTED, Nesting()
            self._nesting.read(char, 0)
            if self._key in ARGUMENTS:
                self._ready.append(char)
        elif char == '"':
            self._state = _State.IN_STRING
        elif char in ",:}]":
            self._state = _State.BROKEN
        else:
            self._state = _State.IN_SCALAR

    # -- keys and values

    def _read_nested(self, text: str, at: int) -> int:
        end = self._nesting.read(text, at)
        if self._key in ARGUMENTS:
            self._ready.append(text[at:end])
        if self._nesting.ended:
            self._end_value(nested=True)
        return end

    def _read_string(self, text: str, at: int) -> int:
        """Read on within a key or a string, up to its end or the next backslash."""
        if self._escaped:
            self._escaped = False
            found, end = None, at + 1
        else:
            found = _STRING_END.search(text, at)
            end = found.end() if found else len(text)
        if self._state is _State.IN_KEY or self._matters:
            self._value.append(text[at:end])
        if found is None:
            return end
        if found[0] == "\\":
            self._escaped = True
        elif self._state is _State.IN_KEY:
            self._key = decoded_literal("".join(self._value)) or ""
            self._state = _State.COLON
        else:
            self._end_value()
        return end

    def _read_scalar(self, text: str, at: int) -> int:
        found = _SCALAR_END.search(text, at)
        end = found.start() if found else len(text)
        if self._matters:
            self._value.append(text[at:end])
        if found:
            self._end_value()
        return end

    @property
    def _matters(self) -> bool:
        """Whether the value of the key is used."""
        return self._key in NAMES or self._key in ARGUMENTS

    def _end_value(self, *, nested: bool = False) -> None:
        self._state = _State.KEY
        value, self._value = "".join(self._value), []
        if self._key in NAMES:
            self.name = None if nested else decoded_literal(value)
            if not self.name:
                self._state = _State.BROKEN
            elif self._ready:  # the arguments came first
                self.started = True
        elif self._key in ARGUMENTS and not nested:
            # Some models write the object as a string, and null or an empty string for no arguments.
            text = decoded_literal(value)
            text = value if text is None else text
            self._ready = ["{}" if text.strip() in ("", "null") else text]
            self.started = self.name is not None
