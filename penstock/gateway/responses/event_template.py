"""How the events of one stream look alike.

Events with tokens differ from the one before in nothing but their text, as a rule. One that does has the
meaning of the other, and its JSON is not read again: that is most of what watching a stream costs.
"""

from __future__ import annotations

import re

_KEY = rb'"(?:text|content|reasoning|reasoning_content|thinking|partial_json|delta)": ?"'
_TEXT = rb'(?=[^"])[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+'
"""What is between the quotes of a JSON string that is not empty (RFC 8259 §7), without ``\\u`` escapes."""

_split = re.compile(rb'(.*?%b)%b(".*)' % (_KEY, _TEXT), re.DOTALL).fullmatch
_is_text = re.compile(_TEXT).fullmatch

MOST_MISSES = 8
"""Events in a row that differ in more than their text, after which no more are compared."""


class EventTemplate:
    """Knows the last event with tokens whose meaning was read from its JSON."""

    __slots__ = ("_head", "_misses", "_tail")

    def __init__(self) -> None:
        self._misses = 0
        self._forget()

    def _forget(self) -> None:
        self._head, self._tail = b"\0", b""  # nothing is like it

    def matches(self, raw: bytes) -> bool:
        """Whether these bytes are one whole event like the last one, with another text that is not empty."""
        head, tail = self._head, self._tail
        if not (raw.startswith(head) and raw.endswith(tail)):
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
        """An event that did not fit, that has tokens and nothing else to note."""
        self._misses += 1
        parts = _split(raw) if self._misses <= MOST_MISSES else None
        if parts is None:
            self._forget()
            return
        self._head, self._tail = parts.groups()
