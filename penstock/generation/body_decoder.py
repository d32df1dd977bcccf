"""Decodes JSON request bodies to typed requests, and explains bodies that cannot be decoded."""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

import msgspec

from penstock.http.errors import MALFORMED, ApiError, refused

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)

MAX_SHOWN = 60
"""Maximum characters of a refused value that an error quotes."""
MAX_DIAGNOSED = 1 << 20
"""Largest malformed body in bytes that is parsed again to locate the error."""
MAX_UNKNOWN_NAMES = 1000
"""Maximum number of unknown field names that are counted; clients choose the names."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class BodyDecoder(Generic[Request]):
    """Decodes the bodies of one request type.

    A body with only known fields of the exact JSON types takes one pass. Any other is decoded again, with
    what vLLM also accepts: numbers and booleans in strings, whole floats for integers, unknown fields.
    """

    def __init__(self, type: type[Request], *, strict: bool) -> None:
        """``strict``: refuse unknown fields; otherwise they are counted and each name is logged once."""
        exact = msgspec.defstruct(type.__name__, (), bases=(type,), forbid_unknown_fields=True, kw_only=True)
        self._decode_exact = cast("msgspec.json.Decoder[Request]", msgspec.json.Decoder(exact)).decode
        self._decode_lax = msgspec.json.Decoder(type, strict=False).decode
        self._known = frozenset(type.__struct_encode_fields__)
        self._strict = strict
        self.unknown: dict[str, int] = {}
        """Number of requests by unknown field."""

    def decode(self, body: bytes) -> Request:
        """The request in ``body``. Raises ApiError."""
        try:
            return self._decode_exact(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._decode_again(body)

    def _decode_again(self, body: bytes) -> Request:
        try:
            names = unknown_fields(body, self._known)
            if names and self._strict:
                raise _unknown_refused(names, self._known)
            request = self._decode_lax(body)
        except msgspec.ValidationError as error:
            raise wrong_type(body, str(error)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(body, error) from None
        self._count(names)
        return request

    def _count(self, names: list[str]) -> None:
        for name in names:
            seen = self.unknown.get(name, 0)
            if not seen:
                if len(self.unknown) >= MAX_UNKNOWN_NAMES:
                    continue
                log.warning("requests have an unknown field %.60r, which is ignored", name)
            self.unknown[name] = seen + 1


def unknown_fields(body: bytes, known: frozenset[str]) -> list[str]:
    """Names of the fields of the JSON object ``body`` that are not in ``known``, in their order.

    Raises msgspec's errors if ``body`` is not a JSON object.
    """
    return [name for name in _decode_fields(body) if name not in known]


def _unknown_refused(names: list[str], known: frozenset[str]) -> ApiError:
    told = []
    for name in names[:5]:
        near = difflib.get_close_matches(name[:MAX_SHOWN], known, n=1)
        told.append(f"{_cut(name)!r} (did you mean {near[0]!r}?)" if near else repr(_cut(name)))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    what = "Unknown field" if len(names) == 1 else "Unknown fields"
    message = (
        f"{what} {', '.join(told)}{more}; this server refuses fields it does not know (--strict-requests)."
    )
    return ApiError(400, message, param=names[0])


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
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def wrong_type(body: bytes, problem: str) -> ApiError:
    """The error for valid JSON of the wrong shape. ``problem``: msgspec's description of it."""
    what, _, where = problem.partition(" - at `")
    in_key = where.startswith("key` in `")
    steps = _steps(where.removeprefix("key` in `").rstrip("`"))
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    wanted, _, got = what.partition(", got ")
    wanted = re.sub(r"`([^`]*)`", lambda match: _in_json_words(match[1]), wanted)
    wanted = wanted[:1].lower() + wanted[1:]
    value = _value_at(body, steps, got.strip("`"))
    name = _spelled(steps) or "the request body"
    if missing:
        message = f"{name}: the required field {missing[1]!r} is missing."
        steps = [*steps, missing[1]]
    elif in_key:
        message = f"{name}: {wanted} as every key."
    else:
        message = f"{name}: {wanted}" + ("." if value is None else f", got {_cut(value)}.")
    return ApiError(400, message, type=MALFORMED, param=".".join(("body", *map(str, steps))))


def _in_json_words(types: str) -> str:
    return " or ".join(_JSON_NAMES.get(name, name) for name in types.split(" | "))


def _steps(path: str) -> list[str | int]:
    """``$.messages[0].content`` as messages, 0, content; mapping keys, which msgspec hides, are ``...``."""
    steps: list[str | int] = []
    for key, index in _STEP.findall(path):
        steps.append(key or (int(index) if index.isdigit() else index))
    return steps


def _spelled(steps: list[str | int]) -> str:
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


def _cut(text: str) -> str:
    """``text``, shortened to MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


# -- bodies that are not JSON


def malformed(body: bytes, error: Exception) -> ApiError:
    """The error for a body that is not JSON; ``error``: raised by the decoder."""
    if not body.strip():
        return _not_json("The request body is empty; it must be a JSON object.", "body")
    if isinstance(error, RecursionError):
        return _not_json("The request body is nested too deeply.", "body")
    try:
        text = body.decode()
    except UnicodeDecodeError as bad:
        return _not_json(
            f"The request body is not UTF-8: byte {bad.start} is {body[bad.start]:#04x}.", "body"
        )
    if len(body) > MAX_DIAGNOSED:
        return _not_json(f"The request body is not valid JSON: {error}.", "body")
    try:
        for path, number in _not_finite(json.loads(text)):
            return refused(f"{path} must be a finite number, got {number}.", path, number)
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


def _not_finite(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Paths and values of the NaN and infinities in a parsed body."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield path.removeprefix(".") or "the request body", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite(item, f"{path}[{index}]")
