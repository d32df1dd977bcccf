"""Recognizes events that differ from an earlier one only in their text, and in their number if they have one.

As a rule, that is how events with tokens differ within a stream. Such an event has the same meaning, and its
JSON is not parsed again: parsing is most of the cost of observing a stream. The responses API numbers its
events; servers put the number before the text or behind it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_KEY = rb'"(?:text|content|reasoning|reasoning_content|thinking|partial_json|delta|response)": ?"'
_ESCAPE = rb'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
_TEXT = rb'(?=[^"\x00-\x1f])[^"\\\x00-\x1f]*+(?:%b[^"\\\x00-\x1f]*+)*+' % _ESCAPE
"""Content of a JSON string that is not empty (RFC 8259 §7) and has no surrogates, which come in pairs."""

_find_text = re.compile(rb'%b(%b)(?=")' % (_KEY, _TEXT)).search
_NUMBER = rb"(?:0|[1-9][0-9]*+)"
_split_at_number = re.compile(rb'(.*?"sequence_number": ?)%b([,}].*)' % _NUMBER, re.DOTALL).fullmatch
_is_number = re.compile(_NUMBER).fullmatch
_is_text = re.compile(_TEXT).fullmatch
_are_texts = re.compile(rb"%b(?:\n%b)*+" % (_TEXT, _TEXT)).fullmatch

MAX_MISSES = 8
"""Consecutive events that differ in more than their text, after which the template is given up."""


class EventParts(NamedTuple):
    """What events have in common: ``head``, then what differs, then ``tail``. Text alone differs; or text and
    a number, with ``between`` between the two."""

    head: bytes
    tail: bytes
    between: bytes = b""
    """Empty: the events have no number."""
    number_first: bool = False


class EventTemplate:
    """The last event with tokens that was parsed, split around its text and its number."""

    __slots__ = ("_misses", "parts")

    def __init__(self) -> None:
        self._misses = 0
        self.parts: EventParts | None = None
        """None: there is no template."""

    def matches(self, raw: bytes) -> bool:
        """Whether these bytes are one complete event that differs from the template only in its text,
        which is not empty, and its number."""
        if self.parts is None:
            return False
        head, tail, between, number_first = self.parts
        if not (raw.startswith(head) and raw.endswith(tail)):
            return False
        start, end = len(head), len(raw) - len(tail)
        if between:
            at = raw.find(between, start, end)
            behind = at + len(between)
            if at < 0 or _is_number(raw, *((start, at) if number_first else (behind, end))) is None:
                return False
            start, end = (behind, end) if number_first else (start, at)
        if _is_text(raw, start, end) is None:
            return False
        if not raw.isascii():
            try:
                raw.decode()
            except UnicodeDecodeError:
                return False
        self._misses = 0
        return True

    def count(self, chunk: bytes) -> int:
        """How many events ``chunk`` has if it consists of such events alone, else 0."""
        if self.matches(chunk):
            return 1
        if self.parts is None or not chunk.startswith(self.parts.head) or not chunk.endswith(b"\n\n"):
            return 0
        events = chunk[:-2].split(b"\n\n")  # which no text contains
        if len(events) > 1 and all(self.matches(b"%b\n\n" % event) for event in events):
            return len(events)
        return 0

    def learn(self, raw: bytes) -> None:
        """Take a parsed event as the new template. It did not match, and has tokens and nothing else."""
        self._misses += 1
        self.parts = _parts(raw) if self._misses <= MAX_MISSES else None


def _parts(raw: bytes) -> EventParts | None:
    """None: the event has no text."""
    if (found := _find_text(raw)) is None:
        return None
    head, tail = raw[: found.start(1)], raw[found.end(1) :]
    if (number := _split_at_number(tail)) is not None:
        between, tail = number.groups()
        return EventParts(head, tail, between)
    if (number := _split_at_number(head)) is not None:
        head, between = number.groups()
        return EventParts(head, tail, between, number_first=True)
    return EventParts(head, tail)


def are_texts(texts: list[bytes]) -> bool:
    """Whether each of ``texts`` is text that a template may have, decided at once."""
    joined = b"\n".join(texts)  # which is no text itself
    if _are_texts(joined) is None:
        return False
    if not joined.isascii():
        try:
            joined.decode()
        except UnicodeDecodeError:
            return False
    return True
