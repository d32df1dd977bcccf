"""Recognizes events that differ from an earlier one only in their text.

As a rule, that is how events with tokens differ within a stream. Such an event has the same meaning, and its
JSON is not parsed again: parsing is most of the cost of observing a stream.
"""

from __future__ import annotations

import re

_KEY = rb'"(?:text|content|reasoning|reasoning_content|thinking|partial_json|delta)": ?"'
_ESCAPE = rb'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
_TEXT = rb'(?=[^"\x00-\x1f])[^"\\\x00-\x1f]*+(?:%b[^"\\\x00-\x1f]*+)*+' % _ESCAPE
"""Content of a JSON string that is not empty (RFC 8259 §7) and has no surrogates, which come in pairs."""

_split = re.compile(rb'(.*?%b)%b(".*)' % (_KEY, _TEXT), re.DOTALL).fullmatch
_is_text = re.compile(_TEXT).fullmatch
_are_texts = re.compile(rb"%b(?:\n%b)*+" % (_TEXT, _TEXT)).fullmatch

MOST_MISSES = 8
"""Consecutive events that differ in more than their text, after which the template is given up."""


class EventTemplate:
    """The last event with tokens that was parsed, split around its text."""

    __slots__ = ("_head", "_misses", "_tail")

    def __init__(self) -> None:
        self._misses = 0
        self._head: bytes | None = None
        """None: there is no template."""
        self._tail = b""

    @property
    def parts(self) -> tuple[bytes, bytes] | None:
        """What precedes and follows the text; None: there is no template."""
        return None if self._head is None else (self._head, self._tail)

    def matches(self, raw: bytes) -> bool:
        """Whether these bytes are one complete event that differs from the template only in its text,
        which is not empty."""
        head, tail = self._head, self._tail
        if head is None or not (raw.startswith(head) and raw.endswith(tail)):
            return False
        if _is_text(raw, len(head), len(raw) - len(tail)) is None:
            return False
        if not raw.isascii():
            try:
                raw.decode()
            except UnicodeDecodeError:
                return False
        self._misses = 0
        return True

    def learn(self, raw: bytes) -> None:
        """Take a parsed event as the new template. It did not match, and has tokens and nothing else."""
        self._misses += 1
        parts = _split(raw) if self._misses <= MOST_MISSES else None
        self._head, self._tail = (None, b"") if parts is None else parts.groups()


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
