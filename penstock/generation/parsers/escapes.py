"""Escapes that a model writes in JSON strings: none of them may become half of a surrogate pair.

``\\ud83d\\ude00`` is one character, and either half alone is none: no reply can encode it, and strict parsers
refuse a text with it. So a half alone is U+FFFD, wherever a model's JSON is decoded or passed on.
"""

from __future__ import annotations

import json
import re

_HEX = "[0-9a-fA-F]"
_HIGH = f"u[dD][89abAB]{_HEX}{{2}}"
_LOW = f"u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(
    rf"\\(?:{_HIGH}\\{_LOW}"
    rf"|(?P<open>(?:u{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?\Z)"
    rf"|(?P<half>{_HIGH}|{_LOW})|u{_HEX}{{4}}|.)",
    re.DOTALL,
)
"""An escape; ``open``: at the text's end, more may belong to it; ``half``: of a pair, without the other."""
_HALF_SIZE = len(r"\ud83d")
REPLACEMENT = "\ufffd"


class WholeEscapes:
    """Passes JSON on in pieces that cut no escape, with ``\\ufffd`` for half pairs; all else stays as it
    is."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""
        """The beginning of an escape."""

    def push(self, text: str) -> str:
        if not self._held and "\\" not in text:
            return text
        text, self._held = self._held + text, ""
        return _ESCAPE.sub(self._passed, text)

    def finish(self) -> str:
        """The last piece."""
        held, self._held = self._held, ""
        return r"\ufffd" + held[_HALF_SIZE:] if len(held) >= _HALF_SIZE else held

    def _passed(self, escape: re.Match[str]) -> str:
        if escape.lastgroup == "open":
            self._held = escape[0]
            return ""
        return r"\ufffd" if escape.lastgroup == "half" else escape[0]


def decoded_text(text: str) -> str:
    """The text inside a JSON string, which cuts no escape. Escapes that JSON does not know stay as they
    are."""
    return _ESCAPE.sub(_character, text) if "\\" in text else text


def _character(escape: re.Match[str]) -> str:
    if escape.lastgroup is not None and len(escape[0]) >= _HALF_SIZE:
        return REPLACEMENT + escape[0][_HALF_SIZE:]
    try:
        character: str = json.loads(f'"{escape[0]}"')
    except ValueError:
        return escape[0]
    return character


def decoded_literal(literal: str) -> str | None:
    """The value of a JSON string literal; None for anything else."""
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    return without_halves(value) if isinstance(value, str) else None


def without_halves(text: str) -> str:
    """``text`` with U+FFFD for surrogates that are no pair, and the character of those that are."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
