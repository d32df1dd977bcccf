"""Limits of grammars: those of llguidance in words, and those of time or memory that it does not have."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from math import lcm

MAX_MULTIPLE = 100_000
"""Least common multiple, in units of the last decimal, of all ``multipleOf`` of a grammar. llguidance makes a
state for each remainder: 2 seconds and 40 MB for 99,991, tenfold for ten times as much."""
MAX_EXPONENT = 20

_LIMITS = (
    ("initial lexer configuration", "the grammar is too large: its texts and patterns together are too long"),
    ("Current row has", "the grammar is too large: too many alternatives at one place"),
    ("Too many items", "the grammar is too large or too ambiguous: too many ways to go on at one place"),
    ("symbols.len()", "the grammar is too large: too many rules"),
    ("too many expressions", "the grammar is too large: its texts, patterns and lengths need too many steps"),
)
"""What stands in llguidance's messages on its limits, and plain words for each."""

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r"multipleOf\\*[\"']?\s*:\s*([0-9.eE+-]+)")


def in_words(message: str) -> str:
    """llguidance's ``message``, with plain words before it if a limit is exceeded."""
    for part, words in _LIMITS:
        if part in message:
            return f"{words} ({message})"
    return message


def check_multiples(grammar: str) -> None:
    """Raises ValueError if the grammar's JSON schemas have ``multipleOf`` that together are too large."""
    if "multiple" not in grammar and "\\u" not in grammar:
        return
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), grammar)
    try:
        values = {Decimal(text) for text in _MULTIPLE.findall(plain)}
    except InvalidOperation:
        return  # llguidance says what is wrong with it
    if not values:
        return
    exponents = [int(value.normalize().as_tuple().exponent) for value in values]
    if max(map(abs, exponents)) > MAX_EXPONENT:
        raise ValueError(f"multipleOf: more than {MAX_EXPONENT} digits")
    unit = Decimal(1).scaleb(min(0, *exponents))
    least = lcm(*(int(value / unit) for value in values))
    if least > MAX_MULTIPLE:
        raise ValueError(
            f"multipleOf: the least common multiple of the grammar's values is {least * unit:f}, but at most "
            f"{MAX_MULTIPLE * unit:f} is compiled"
        )
