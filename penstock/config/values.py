"""Converts the text of a flag, variable or file key to a checked value."""

from __future__ import annotations

import math
import re

import msgspec

from penstock.config.errors import ConfigError, did_you_mean
from penstock.config.hidden import HIDDEN, hide_credentials
from penstock.config.introspect import Alternative, Option
from penstock.config.origins import Origin

Value = str | int | float | bool

# As in vLLM: lower-case suffixes are powers of 1,000, upper-case ones of 1,024. Ki, Mi and Gi are the
# unambiguous spelling of the latter.
MULTIPLIERS: dict[str | None, int] = {None: 1, "k": 10**3, "m": 10**6, "g": 10**9}
MULTIPLIERS |= {
    name: 1 << bits for bits, names in ((10, "K Ki"), (20, "M Mi"), (30, "G Gi")) for name in names.split()
}
_INTEGER = re.compile(r"([+-]?[0-9]+)(?:(?:\.([0-9]+))?(k|m|g|Ki|Mi|Gi|K|M|G))?")
_SUFFIXED = re.compile(r"'[+-]?[0-9.]+ ?[A-Za-z]+'")
"""A quoted number with letters after it."""
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
"""Signed integers of this size can be passed to child processes as JSON."""
LONGEST_SHOWN = 80
"""Maximum characters of an invalid value that an error shows."""


def parse_integer(text: str) -> int:
    """``32k`` is 32,000, ``32K`` and ``32Ki`` are 32,768, ``1.5Gi`` is 1,610,612,736.

    Raises ValueError for anything but a whole number.
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
    """A finite decimal number. Raises ValueError for anything else: JSON has no ``nan`` and ``inf``."""
    if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def convert(option: Option, origin: Origin, given: str | list[str] | None) -> Value | list[Value] | None:
    """The checked value of ``option`` for the text (for a list: texts) set at ``origin``.

    Raises ConfigError with origin, option, text and the allowed values.
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
    """The error for a value that ``option`` does not allow; ``shown`` is the text of the value."""
    subject = "" if origin.name == option.flag else f" for {option.flag}"
    suffixes = ""
    if _SUFFIXED.fullmatch(shown) and "integer" in {each.kind for each in option.alternatives}:
        suffixes = "; suffixes are k, m, g (powers of 1000) and K, M, G or Ki, Mi, Gi (powers of 1024)"
    suffixes += did_you_mean(
        shown.strip("'"), [name for each in option.alternatives for name in each.choices]
    )
    return ConfigError(f"{origin}: {shown} is not valid{subject}, it takes {option.allowed}{suffixes}")


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
    """``text`` as a value of this type, without a check of bounds. Raises ValueError."""
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
            # An empty text is nearly always an unset shell variable. As an API key it would disable
            # authentication.
            if text:
                return text
    raise ValueError(text)


def _shown(option: Option, text: str) -> str:
    if option.secret:
        return HIDDEN
    if not text:
        return "an empty text"
    text = hide_credentials(text)  # before it is cut
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")
