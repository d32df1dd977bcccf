"""Decodes JSON request bodies to typed requests."""

from __future__ import annotations

import difflib
import functools
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from penstock.generation.prompt.prompts import token_columns
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.request.unknown_fields import (
    UnknownField,
    exact_type,
    unknown_fields,
    with_raw_field,
)
from penstock.http.body_errors import malformed, wrong_type
from penstock.http.errors import MALFORMED, MAX_VALUE, ApiError, shown
from penstock.http.repeated_names import check_names

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)

MAX_SHOWN = MAX_VALUE
MAX_PARTS = 100_000
"""Maximum strings, lists and objects of a body. Decoded, one takes up to 300 bytes, and 0.5 us in which
nothing else runs; a body of 64 MB could have 20 million."""
MAX_COMMAS = 1 << 20
"""Maximum commas of a body outside strings, which separate token ids for instance, unless two prompts of the
model's context have more."""
MAX_UNKNOWN_NAMES = 256
"""Maximum number of unknown field names that are counted, by their first MAX_SHOWN characters; clients choose
the names."""
MANY_BYTES, BYTES_PER_ID = 1024, 12
"""A body of at least so many bytes, with a comma in less than so many on average, may be a list of token ids.
Fewer ids take less time as Python's ints."""
_COUNTED_BYTES = 1 << 18
"""Bytes whose parts are counted at a time."""
_COUNTED_AT_ONCE = 1 << 16
"""Bytes whose parts are counted at a time if parts in strings count, too: arrays of this size stay in the
processor's cache."""

HEAD_BYTES = 1 << 18
"""Bytes of a body within which its messages are to begin; others are decoded as a whole."""

_INDEX = re.compile(r"\[\d+\]")
_SEPARATOR = re.compile(rb"[ \t\r\n,]*")
_STAND_IN = secrets.token_hex(16)
"""Role of a message in place of known ones; nobody can send it."""
_STAND_IN_JSON = msgspec.json.encode({"role": _STAND_IN, "content": ""})


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
        flat_ids: bool = False,
        once: bool = False,
        messages: str | None = None,
    ) -> None:
        """``strict``: refuse unknown fields; otherwise they are counted and each name is logged once.
        ``max_commas``: see :func:`check_parts`. ``id_field``: an optional field that may have many token ids,
        which become columns (:func:`~penstock.generation.prompt.prompts.token_columns`) if they are nothing
        else. ``flat_ids``: it takes one list of ids, not several. ``once``: refuse a body that has a field
        twice; otherwise the last one counts. ``messages``: the field of a conversation's messages, objects
        with a role and content."""
        self._id_field, self._flat_ids = id_field or "", flat_ids
        self._type = type
        self._strict = strict
        self._max_commas = max_commas
        self._once = once
        self._conversations = None if messages is None else ConversationDecoder(type, messages, self)
        self.unknown: dict[str, int] = {}
        """Number of requests by unknown field, such as ``messages[].foo``."""

    # Decoders are made when they are first needed: msgspec takes up to 10 ms for each, and most servers are
    # asked over one API.

    @functools.cached_property
    def _decode_exact(self) -> Callable[[bytes], Request]:
        exact: Any = exact_type(self._type)
        return cast("msgspec.json.Decoder[Request]", msgspec.json.Decoder(exact)).decode

    @functools.cached_property
    def _decode_but_ids(self) -> Callable[[bytes], Request]:
        raw: Any = with_raw_field(exact_type(self._type), self._id_field)
        return cast("msgspec.json.Decoder[Request]", msgspec.json.Decoder(raw)).decode

    @functools.cached_property
    def _decode_lax(self) -> Callable[[bytes], Request]:
        return msgspec.json.Decoder(self._type, strict=False).decode

    def decode(self, body: bytes, turn: NextTurn | None = None) -> Request:
        """The request in ``body``. ``turn``: of a conversation, whose known messages are not decoded again.
        Raises ApiError."""
        if turn is not None and not turn.named and self._conversations is not None:
            return self._conversations.decode(body, turn)
        request = self.decode_whole(body)
        if self._once:
            check_names(body)
        return request

    def decode_whole(self, body: bytes) -> Request:
        """As :meth:`decode`, without a look at names that are there twice."""
        self.check(body)
        try:
            if self._id_field and _has_many_ids(body):
                request = self._decode_but_ids(body)
                columns = token_columns(bytes(getattr(request, self._id_field)), flat=self._flat_ids)
                if columns is not None:
                    setattr(request, self._id_field, columns)
                    return request
            return self._decode_exact(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self.decode_again(body)

    def decode_exact(self, body: bytes) -> Request:
        """The request in ``body`` if that has only known fields of the exact types. Raises msgspec's errors
        and UnicodeDecodeError."""
        return self._decode_exact(body)

    def check(self, body: bytes) -> None:
        """Raises ApiError for a body of too many parts."""
        check_parts(body, "The request body", max_commas=self._max_commas)

    def decode_again(self, body: bytes) -> Request:
        """The request in a body that :meth:`decode_exact` refuses. Raises ApiError."""
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
        for name in dict.fromkeys(shown(_INDEX.sub("[]", field.within) + field.name) for field in unknown):
            seen = self.unknown.get(name, 0)
            if not seen:
                if len(self.unknown) >= MAX_UNKNOWN_NAMES:
                    continue
                fresh.append(name)
            self.unknown[name] = seen + 1
        if fresh:
            more = f" and {len(fresh) - 5} more" if len(fresh) > 5 else ""
            names = ", ".join(map(repr, fresh[:5])) + more
            log.warning("requests have unknown fields, which are ignored: %s", names)


class ConversationDecoder(Generic[Request]):
    """Decodes bodies whose first messages are those of the turn before: a stand-in takes their place, so
    that all other text is read as it stands, and they are put in place of the stand-in."""

    def __init__(self, type: type[Request], field: str, whole: BodyDecoder[Request]) -> None:
        """``field``: that of the messages; ``whole``: for bodies with known fields of exact types."""
        self._kind = type.__name__
        self._field = field
        self._whole = whole
        self._opening = re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*\[' % field.encode())

    @functools.cached_property
    def _decode_messages(self) -> Callable[[bytes], Any]:
        raw = msgspec.defstruct("Messages", [(self._field, list[msgspec.Raw])])
        return msgspec.json.Decoder(raw).decode

    def decode(self, body: bytes, turn: NextTurn) -> Request:
        """The request in ``body``. Raises ApiError."""
        opening = self._opening.search(body, 0, HEAD_BYTES)
        if opening is None:
            return self._whole.decode_whole(body)
        start = opening.end()
        known = turn.find(self._kind, body, start)
        if known is not None:
            rest = b"".join((body[:start], _STAND_IN_JSON, body[known.end :]))
            parts = known.parts + count_parts(rest)
            if parts > MAX_PARTS or len(body) > MAX_COMMAS:
                self._whole.check(body)
            try:
                request = self._whole.decode_exact(rest)
                messages = getattr(request, self._field)
                if type(messages) is list and messages and messages[0].role == _STAND_IN:
                    messages[:1] = known.decoded
                    fresh = getattr(self._decode_messages(rest), self._field)[1:]
                    self._learn(turn, body, start, known.end, fresh, messages, parts)
                    return request
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass
            turn.miss()
        self._whole.check(body)
        try:
            request = self._whole.decode_exact(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._whole.decode_again(body)
        messages = getattr(request, self._field)
        if type(messages) is list:
            fresh = getattr(self._decode_messages(body), self._field)
            self._learn(turn, body, start, start, fresh, messages, count_parts(body))
        return request

    def _learn(
        self,
        turn: NextTurn,
        body: bytes,
        start: int,
        at: int,
        fresh: list[msgspec.Raw],
        messages: list[msgspec.Struct],
        parts: int,
    ) -> None:
        """Keep the messages for the next turn. ``fresh``: those from ``at`` on."""
        ends = []
        for each in map(bytes, fresh):
            separator = _SEPARATOR.match(body, at)
            at = at if separator is None else separator.end()
            if not body.startswith(each, at):
                return  # the field is there twice
            at += len(each)
            ends.append(at)
        if messages:
            turn.learn(body, start, ends, messages, parts)


def count_parts(text: bytes) -> int:
    """No less than the strings, lists and objects of the JSON ``text``."""
    codes = np.frombuffer(text, np.uint8)
    parts = 0
    for start in range(0, len(codes), _COUNTED_AT_ONCE):
        piece = codes[start : start + _COUNTED_AT_ONCE]
        openings = np.count_nonzero(piece & 0xDF == ord("["))  # { differs from [ by that bit
        parts += int(openings) + (int(np.count_nonzero(piece == ord('"'))) + 1) // 2
    return parts


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
    if count_parts(text) > MAX_PARTS:
        return False
    commas = 0
    if len(text) > max_commas:
        codes = np.frombuffer(text, np.uint8)
        for start in range(0, len(codes), _COUNTED_AT_ONCE):
            commas += int(np.count_nonzero(codes[start : start + _COUNTED_AT_ONCE] == ord(",")))
    return commas <= max_commas


def _is_closed(type: type[msgspec.Struct]) -> bool:
    """Whether unknown fields of ``type`` are refused by every server."""
    return bool(type.__struct_config__.forbid_unknown_fields)


def _unknown_refused(unknown: list[UnknownField]) -> ApiError:
    """The error for unknown fields. Of a closed type it names the known ones, because the server is not the
    one that is strict."""
    told = []
    for field in unknown[:5]:
        near = difflib.get_close_matches(field.name[:MAX_SHOWN], field.owner.__struct_encode_fields__, n=1)
        name = repr(field.within + shown(field.name))
        told.append(f"{name} (did you mean {near[0]!r}?)" if near else name)
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    what = "Unknown field" if len(unknown) == 1 else "Unknown fields"
    first = unknown[0]
    why = "this server refuses fields it does not know (--strict-requests)"
    if _is_closed(first.owner):
        why = f"{first.within[:-1] or 'the body'} has {', '.join(first.owner.__struct_encode_fields__)}"
    return ApiError(400, f"{what} {', '.join(told)}{more}; {why}.", param=first.within + shown(first.name))
