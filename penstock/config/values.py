"""From the text of a flag, variable or file key to the value of its option."""

from __future__ import annotations

import math
import re

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.introspect import HIDDEN, Alternative, Option
from penstock.config.origins import Origin

Value = str | int | float | bool

# vLLM's rule: a lower-case suffix counts in thousands, an upper-case one in 1,024s; Ki, Mi and Gi are
# the unambiguous spelling of the latter.
MULTIPLIERS: dict[str | None, int] = {None: 1, "k": 10**3, "m": 10**6, "g": 10**9}
MULTIPLIERS |= {
    name: 1 << bits for bits, names in ((10, "K Ki"), (20, "M Mi"), (30, "G Gi")) for name in names.split()
}
_INTEGER = re.compile(r"([+-]?[0-9]+)(?:(?:\.([0-9]+))?(k|m|g|Ki|Mi|Gi|K|M|G))?")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
SWITCH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
INTEGER_BITS = 64
"""Size of a signed integer that survives the way to the child processes as JSON."""
LONGEST_SHOWN = 80
"""Characters of a bad value that an error repeats."""


def parse_integer(text: str) -> int:
    """``32k`` is 32,000, ``32K`` and ``32Ki`` are 32,768, ``1.5Gi`` is 1,610,612,736.

    Raises ValueError for anything that is not a whole number.
    """
    match = _INTEGER.fullmatch(text)
    if match is None:
        raise ValueError(text)
    whole, fraction, suffix = match.group(1), match.group(2) or "", match.group(3)
    value, rest = divmod(int(whole + fraction) * MULTIPLIERS[suffix], int(10 ** len(fraction)))
    if rest:
        raise ValueError(text)
    return value


def parse_number(text: str) -> float:
    """A finite decimal number; ValueError for anything else (``nan`` and ``inf`` do not survive JSON)."""
    if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def convert(option: Option, origin: Origin, given: str | list[str] | None) -> Value | list[Value] | None:
    """The checked value of ``option`` for the text (texts, for a list) given at ``origin``.

    Raises ConfigError that names origin, option, text and what is allowed.
    """
    if given is None:
        if option.optional:
            return None
        raise invalid_value(option, origin, "null")
    if isinstance(given, list) and not option.many:
        raise invalid_value(option, origin, "a list")
    texts = given if isinstance(given, list) else [given]
    if option.many and {alternative.kind for alternative in option.alternatives} <= {"integer", "number"}:
        texts = [part.strip() for text in texts for part in text.split(",")]
    if not texts:
        raise invalid_value(option, origin, "an empty list")
    values = [_convert_one(option, origin, text) for text in texts]
    value = values if option.many else values[0]
    try:
        msgspec.convert(value, option.type)
    except msgspec.ValidationError:
        raise invalid_value(option, origin, _shown(option, ", ".join(texts))) from None
    return value


def invalid_value(option: Option, origin: Origin, shown: str) -> ConfigError:
    """The error for a value that ``option`` does not take; ``shown`` names it."""
    subject = "" if origin.name == option.flag else f" for {option.flag}"
    return ConfigError(f"{origin}: {shown} is not valid{subject}, it takes {option.allowed}")


def _convert_one(option: Option, origin: Origin, text: str) -> Value:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{origin}: the value is not valid UTF-8") from None
    for alternative in sorted(option.alternatives, key=lambda one: one.kind == "text"):
        try:
            value = _as(alternative, text)
        except ValueError:
            continue
        if isinstance(value, int) and value.bit_length() >= INTEGER_BITS:
            shown = _shown(option, text)
            raise ConfigError(f"{origin}: {shown} does not fit into {INTEGER_BITS} bits")
        return value
    raise invalid_value(option, origin, _shown(option, text))


def _as(alternative: Alternative, text: str) -> Value:
    """``text`` as one kind of value, bounds not checked; ValueError when it is none."""
    match alternative.kind:
        case "integer":
            return parse_integer(text)
        case "number":
            return parse_number(text)
        case "switch":
            if text.lower() in SWITCH:
                return SWITCH[text.lower()]
        case "choice":
            if text in alternative.choices:
                return text
        case "text":
            # An empty text is nearly always an unset shell variable; for a key it would open the server.
            if text:
                return text
    raise ValueError(text)


def _shown(option: Option, text: str) -> str:
    if option.secret:
        return HIDDEN
    if not text:
        return "an empty text"
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")
