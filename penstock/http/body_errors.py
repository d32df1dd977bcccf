"""Explains JSON request bodies that cannot be decoded."""

from __future__ import annotations

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.http.errors import MALFORMED, MAX_VALUE, ApiError, refused, shown

MAX_DIAGNOSED = 1 << 16
"""Largest malformed body in bytes that is parsed again to locate the error."""
MAX_ESCAPES = 1 << 16
"""Escapes of a larger one that are searched for half a surrogate pair; all of them take 50 ms."""
MAX_WRONG_KEYS = 5
"""Keys of the wrong type that an error names."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

# -- fields of the wrong type

_JSON_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_FIRST_BYTES = {
    "str": b'"',
    "array": b"[",
    "object": b"{",
    "bool": b"tf",
    "null": b"n",
    "int": b"-0123456789",
}
"""First bytes of a JSON value, by msgspec's type names."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""Escapes of a surrogate, and of two that are one character."""
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def wrong_type(body: bytes, problem: str) -> ApiError:
    """The error for valid JSON of the wrong shape. ``problem``: msgspec's description of it."""
    what, _, where = problem.partition(" - at `")
    in_key = where.startswith("key` in `")
    steps = _steps(where.removeprefix("key` in `").rstrip("`"))
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    wanted, _, got = what.partition(", got ")
    wanted = re.sub(r"`([^`]*)`", lambda match: _in_json_words(match[1]), wanted)
    wanted = _cut_middle(wanted[:1].lower() + wanted[1:])  # it may have the name of an unknown field
    value = _value_at(body, steps, got.strip("`"))
    name = _cut_middle(_shown_path(steps)) or "the request body"
    if missing:
        message = f"{name}: the required field {missing[1]!r} is missing."
        steps = [*steps, missing[1]]
    elif in_key:
        message = f"{name}: {wanted} as every key{_wrong_keys(value)}."
    else:
        message = f"{name}: {wanted}" + ("." if value is None else f", got {shown(value)}.")
    return ApiError(400, message, type=MALFORMED, param=".".join(("body", *map(str, steps))))


def _wrong_keys(mapping: str | None) -> str:
    """The first keys of a JSON object that are no integers, for the message."""
    if mapping is None:
        return ""
    wrong = [key for key in _decode_fields(mapping) if not re.fullmatch(r"-?[0-9]+", key)]
    names = ", ".join(repr(shown(key)) for key in wrong[:MAX_WRONG_KEYS])
    more = f" and {len(wrong) - MAX_WRONG_KEYS} more" if len(wrong) > MAX_WRONG_KEYS else ""
    return f", got {names}{more}" if wrong else ""


def _in_json_words(types: str) -> str:
    return " or ".join(_JSON_NAMES.get(name, name) for name in types.split(" | "))


def _steps(path: str) -> list[str | int]:
    """``$.messages[0].content`` as messages, 0, content; mapping keys, which msgspec hides, are ``...``."""
    steps: list[str | int] = []
    for key, index in _STEP.findall(path):
        steps.append(key or (int(index) if index.isdigit() else index))
    return steps


def _shown_path(steps: list[str | int]) -> str:
    name = ""
    for step in steps:
        name += f"[{step}]" if isinstance(step, int) or step == "..." else f".{step}"
    return name.removeprefix(".")


def _value_at(body: bytes, steps: list[str | int], got: str) -> str | None:
    """The JSON text at ``steps``; None if there is none. Replaces a step ``...`` in place by its key: the
    first one with a value of type ``got``."""
    value = msgspec.Raw(body)
    try:
        for number, step in enumerate(steps):
            if isinstance(step, int):
                value = _decode_items(value)[step]
                continue
            fields = _decode_fields(value)
            if step == "...":
                first = _FIRST_BYTES.get(got, b"")
                step = steps[number] = next(key for key, item in fields.items() if bytes(item)[0] in first)
            value = fields[step]
        return bytes(value).decode().strip()
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, StopIteration):
        return None


def _cut_middle(text: str) -> str:
    """``text``, shortened to about three times :data:`MAX_VALUE` characters."""
    if len(text) <= 3 * MAX_VALUE:
        return text
    return f"{text[: 2 * MAX_VALUE]}…{text[-MAX_VALUE:]}"


# -- bodies that are not JSON


def malformed(body: bytes, error: Exception) -> ApiError:
    """The error for a body that is not JSON; ``error``: raised by the decoder."""
    if not body.strip():
        return _not_json("The request body is empty; it must be a JSON object.", "body")
    if isinstance(error, RecursionError):
        return _not_json("The request body is nested too deeply.", "body")
    if body.startswith(BOM_UTF8):
        return _not_json(
            "The request body begins with a byte order mark (BOM, EF BB BF), which JSON does not allow.",
            "body.0",
        )
    try:
        text = body.decode()
    except UnicodeDecodeError as bad:
        return _not_json(
            f"The request body is not UTF-8: byte {bad.start} is {body[bad.start]:#04x}.", "body"
        )
    if text.startswith("\ufeff"):
        return _not_json(
            "The request body starts with a byte order mark (U+FEFF), which JSON must not have: send UTF-8 "
            "without it.",
            "body.0",
        )
    if len(body) > MAX_DIAGNOSED:
        known = _unpaired_surrogate(body)
        return known or _not_json(f"The request body is not valid JSON: {error}.", "body")
    try:
        for path, value in _not_json_values(json.loads(text)):
            path = _cut_middle(path)
            if isinstance(value, float):
                return refused(f"{path} must be a finite number, got {value}.", path, value)
            place = next(place for place, character in enumerate(value) if _is_surrogate(character))
            return _not_json(
                f"{path}: character {place} of the string is \\u{ord(value[place]):04x}, half of a surrogate "
                "pair without the other half; cut text between characters.",
                f"body.{path}",
            )
    except json.JSONDecodeError as bad:
        where = f"at position {bad.pos} (line {bad.lineno}, column {bad.colno})"
        return _not_json(
            f"The request body is not valid JSON: {bad.msg.removesuffix(' at')} {where}.", f"body.{bad.pos}"
        )
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        pass
    # Python's parser accepts some bodies that msgspec refuses.
    return _not_json(f"The request body is not valid JSON, or has an unpaired surrogate: {error}.", "body")


def _not_json(message: str, param: str) -> ApiError:
    return ApiError(400, message, type=MALFORMED, param=param)


def _unpaired_surrogate(body: bytes) -> ApiError | None:
    """The error for a large body with an unpaired surrogate among its first MAX_ESCAPES escapes."""
    start = 0
    for _ in range(MAX_ESCAPES):
        start = body.find(b"\\u", start)
        if start < 0:
            break
        before = body[max(0, start - MAX_VALUE) : start]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            start += 2  # the backslash is escaped itself
        elif _PAIR.match(body, start):
            start += 12
        elif _HALF.match(body, start):
            escape = body[start : start + 6].decode()
            return _not_json(
                f"Byte {start} of the request body is {escape}, half of a surrogate pair without the other "
                "half; cut text between characters.",
                "body",
            )
        else:
            start += 6
    return None


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _not_json_values(value: Any, path: str = "") -> Iterator[tuple[str, float | str]]:
    """Paths and values that Python's parser takes and JSON does not have: NaN, infinities, and strings with
    an unpaired surrogate."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield path.removeprefix(".") or "the request body", value
    elif isinstance(value, str):
        if any(map(_is_surrogate, value)):
            yield path.removeprefix(".") or "the request body", value
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key.encode(errors='backslashreplace').decode()}"
            yield from _not_json_values(key, inner)
            yield from _not_json_values(item, inner)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json_values(item, f"{path}[{index}]")
