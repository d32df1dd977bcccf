"""Decodes JSON request bodies to typed requests, and explains bodies that cannot be decoded."""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from penstock.generation.prompt.prompts import token_columns
from penstock.generation.request.unknown_fields import (
    UnknownField,
    exact_type,
    unknown_fields,
    with_raw_field,
)
from penstock.http.errors import MALFORMED, MAX_VALUE, ApiError, refused

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)

MAX_SHOWN = MAX_VALUE
MAX_PARTS = 100_000
"""Maximum strings, lists and objects of a body. Decoded, one takes up to 300 bytes, and 0.5 us in which
nothing else runs; a body of 64 MB could have 20 million."""
MAX_COMMAS = 1 << 20
"""Maximum commas of a body outside strings, which separate token ids for instance, unless two prompts of the
model's context have more."""
MAX_DIAGNOSED = 1 << 16
"""Largest malformed body in bytes that is parsed again to locate the error."""
MAX_ESCAPES = 1 << 16
"""Escapes of a larger one that are searched for half a surrogate pair; all of them take 50 ms."""
MAX_UNKNOWN_NAMES = 256
"""Maximum number of unknown field names that are counted, by their first MAX_SHOWN characters; clients choose
the names."""
MAX_WRONG_KEYS = 5
"""Keys of the wrong type that an error names."""
MANY_BYTES, BYTES_PER_ID = 1024, 12
"""A body of at least so many bytes, with a comma in less than so many on average, may be a list of token ids.
Fewer ids take less time as Python's ints."""
_COUNTED_BYTES = 1 << 18
"""Bytes whose parts are counted at a time."""
_COUNTED_AT_ONCE = 1 << 16
"""Bytes whose parts are counted at a time if parts in strings count, too: arrays of this size stay in the
processor's cache."""

_INDEX = re.compile(r"\[\d+\]")

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class BodyDecoder(Generic[Request]):
    """Decodes the bodies of one request type.

    A body with only known fields of the exact JSON types takes one pass. Any other is decoded again, with
    what vLLM also accepts: numbers and booleans in strings, whole floats for integers, unknown fields.
    """

    def __init__(
        self,
        type: type[Request],
        *,
        strict: bool,
        max_commas: int = MAX_COMMAS,
        id_field: str | None = None,
    ) -> None:
        """``strict``: refuse unknown fields; otherwise they are counted and each name is logged once.
        ``max_commas``: see :func:`check_parts`. ``id_field``: an optional field that may have many token ids,
        which become columns (:func:`~penstock.generation.prompt.prompts.token_columns`) if they are nothing
        else."""
        exact: Any = exact_type(type)
        self._decode_exact = cast("msgspec.json.Decoder[Request]", msgspec.json.Decoder(exact)).decode
        self._id_field = id_field or ""
        raw: Any = with_raw_field(exact, id_field) if id_field else exact
        self._decode_but_ids = cast("msgspec.json.Decoder[Request]", msgspec.json.Decoder(raw)).decode
        self._decode_lax = msgspec.json.Decoder(type, strict=False).decode
        self._type = type
        self._strict = strict
        self._max_commas = max_commas
        self.unknown: dict[str, int] = {}
        """Number of requests by unknown field, such as ``messages[].foo``."""

    def decode(self, body: bytes) -> Request:
        """The request in ``body``. Raises ApiError."""
        check_parts(body, "The request body", max_commas=self._max_commas)
        try:
            if self._id_field and _has_many_ids(body):
                request = self._decode_but_ids(body)
                columns = token_columns(bytes(getattr(request, self._id_field)))
                if columns is not None:
                    setattr(request, self._id_field, columns)
                    return request
            return self._decode_exact(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._decode_again(body)

    def _decode_again(self, body: bytes) -> Request:
        try:
            unknown = unknown_fields(body, self._type)
            refused = unknown if self._strict else [field for field in unknown if _is_closed(field.owner)]
            if refused:
                raise _unknown_refused(refused)
            request = self._decode_lax(body)
        except msgspec.ValidationError as error:
            raise wrong_type(body, str(error)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(body, error) from None
        if unknown:
            self._count(unknown)
        return request

    def _count(self, unknown: list[UnknownField]) -> None:
        fresh = []
        for name in dict.fromkeys(_cut(_INDEX.sub("[]", field.within) + field.name) for field in unknown):
            seen = self.unknown.get(name, 0)
            if not seen:
                if len(self.unknown) >= MAX_UNKNOWN_NAMES:
                    continue
                fresh.append(name)
            self.unknown[name] = seen + 1
        if fresh:
            more = f" and {len(fresh) - 5} more" if len(fresh) > 5 else ""
            shown = ", ".join(map(repr, fresh[:5])) + more
            log.warning("requests have unknown fields, which are ignored: %s", shown)


def _has_many_ids(body: bytes) -> bool:
    """Whether decoding token ids apart from the rest is likely to save time."""
    return len(body) >= MANY_BYTES and body.count(b",") * BYTES_PER_ID > len(body)


def check_parts(text: bytes, what: str, param: str = "body", *, max_commas: int = MAX_COMMAS) -> None:
    """Raises ApiError if the JSON ``text`` has more than MAX_PARTS strings, lists and objects, or more than
    ``max_commas`` commas between them. ``what`` names it in the message."""
    if len(text) < 2 * MAX_PARTS or _has_few_parts(text, max_commas):
        return
    quotes = openings = commas = start = 0
    while start < len(text):
        piece = text[start : start + _COUNTED_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2 and 1 < len(piece) < len(text) - start:
            piece = piece[:-1]  # it escapes the first byte of the next piece
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        codes = np.frombuffer(piece, np.uint8)
        is_quote = codes == ord('"')
        outside = (np.cumsum(is_quote, dtype=np.uint8) + np.uint8(quotes % 2)) & 1 == 0
        quotes += int(np.count_nonzero(is_quote))
        openings += int(np.count_nonzero(((codes == ord("[")) | (codes == ord("{"))) & outside))
        commas += int(np.count_nonzero((codes == ord(",")) & outside))
        if quotes // 2 + openings > MAX_PARTS:
            message = (
                f"{what} has more than {MAX_PARTS} strings, lists and objects, the most that one request may "
                "have. Send it as several requests."
            )
            raise ApiError(400, message, type=MALFORMED, param=param)
        if commas > max_commas:
            message = (
                f"{what} has more than {max_commas} values, such as token ids: the most that one request may "
                "have. Send the prompts in several requests, or as texts."
            )
            raise ApiError(400, message, type=MALFORMED, param=param)


def _has_few_parts(text: bytes, max_commas: int) -> bool:
    """Whether ``text`` is within the bounds of :func:`check_parts` even if no part of it is in a string: true
    for a conversation, and told in a twentieth of the time."""
    codes = np.frombuffer(text, np.uint8)
    parts = commas = 0
    for start in range(0, len(codes), _COUNTED_AT_ONCE):
        piece = codes[start : start + _COUNTED_AT_ONCE]
        openings = np.count_nonzero(piece & 0xDF == ord("["))  # { differs from [ by that bit
        parts += int(openings) + (int(np.count_nonzero(piece == ord('"'))) + 1) // 2
        if len(text) > max_commas:
            commas += int(np.count_nonzero(piece == ord(",")))
    return parts <= MAX_PARTS and commas <= max_commas


def _is_closed(type: type[msgspec.Struct]) -> bool:
    """Whether unknown fields of ``type`` are refused by every server."""
    return bool(type.__struct_config__.forbid_unknown_fields)


def _unknown_refused(unknown: list[UnknownField]) -> ApiError:
    """The error for unknown fields. Of a closed type it names the known ones, because the server is not the
    one that is strict."""
    told = []
    for field in unknown[:5]:
        near = difflib.get_close_matches(field.name[:MAX_SHOWN], field.owner.__struct_encode_fields__, n=1)
        shown = repr(field.within + _cut(field.name))
        told.append(f"{shown} (did you mean {near[0]!r}?)" if near else shown)
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    what = "Unknown field" if len(unknown) == 1 else "Unknown fields"
    first = unknown[0]
    why = "this server refuses fields it does not know (--strict-requests)"
    if _is_closed(first.owner):
        why = f"{first.within[:-1]} has {', '.join(first.owner.__struct_encode_fields__)}"
    return ApiError(400, f"{what} {', '.join(told)}{more}; {why}.", param=first.within + _cut(first.name))


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
    name = _cut_middle(_spelled(steps)) or "the request body"
    if missing:
        message = f"{name}: the required field {missing[1]!r} is missing."
        steps = [*steps, missing[1]]
    elif in_key:
        message = f"{name}: {wanted} as every key{_wrong_keys(value)}."
    else:
        message = f"{name}: {wanted}" + ("." if value is None else f", got {_cut(value)}.")
    return ApiError(400, message, type=MALFORMED, param=".".join(("body", *map(str, steps))))


def _wrong_keys(mapping: str | None) -> str:
    """The first keys of a JSON object that are no integers, for the message."""
    if mapping is None:
        return ""
    wrong = [key for key in _decode_fields(mapping) if not re.fullmatch(r"-?[0-9]+", key)]
    shown = ", ".join(repr(_cut(key)) for key in wrong[:MAX_WRONG_KEYS])
    more = f" and {len(wrong) - MAX_WRONG_KEYS} more" if len(wrong) > MAX_WRONG_KEYS else ""
    return f", got {shown}{more}" if wrong else ""


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


def _cut_middle(text: str) -> str:
    """``text``, shortened to about 3 MAX_SHOWN characters."""
    if len(text) <= 3 * MAX_SHOWN:
        return text
    return f"{text[: 2 * MAX_SHOWN]}…{text[-MAX_SHOWN:]}"


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
        before = body[max(0, start - MAX_SHOWN) : start]
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
