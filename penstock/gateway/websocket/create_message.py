"""A client's ``response.create``, and the request over HTTP that it stands for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from penstock.http.body_errors import malformed
from penstock.http.errors import ApiError, shown

CREATE, CANCEL = "response.create", "response.cancel"
CANCEL_MESSAGE = b'{"type":"response.cancel"}'
MAX_LANE = 256
"""Characters of the name of a lane."""
_begins_create = re.compile(
    rb'\s*\{\s*"type"\s*:\s*"response\.create"\s*,(\s*"model"\s*:\s*"[^"\\]*"\s*,)?(?:\s*"stream"\s*:\s*true\s*,)?'
).match
"""Matches what most clients begin with, Codex with ``stream`` as well."""
_OWN_FIELDS = (b'"stream"', b'"stream_id"', b'"generate"')
"""Fields that the message and the request do not share, as a message spells them."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Names(msgspec.Struct, gc=False):
    """What decides what a message is for."""

    type: Any = None
    response_id: Any = None


_names = msgspec.json.Decoder(_Names).decode


class CreateMessage(NamedTuple):
    """Immutable."""

    data: bytes
    """As the client sent it."""
    raw: bytes
    """The body of the request."""
    lane: str | None
    """Responses of one lane (``stream_id``) come one after the other, those of several at the same time."""
    prewarm: bool
    """Nothing is to be generated: the server prepares for the next message."""

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return len(self.data) + len(self.raw)

    def sent_as(self, raw: bytes) -> bytes:
        """The message for a server that is to get the body ``raw``: the client's, unless a model was
        replaced."""
        if raw is self.raw:
            return self.data
        fields: dict[str, Any] = {"type": CREATE, **_fields(raw)}
        del fields["stream"]
        if self.lane is not None:
            fields["stream_id"] = self.lane
        if self.prewarm:
            fields["generate"] = False
        return _encode(fields)


def read_message(data: bytes) -> CreateMessage | None:
    """``data``, which is UTF-8; None: it is a ``response.cancel``. Raises ApiError for any other."""
    begin = _begins_create(data)
    if begin is not None and all(data.find(name, begin.end()) < 0 for name in _OWN_FIELDS):
        raw = b'{"stream":true,%b%b' % (begin[1] or b"", data[begin.end() :])
        if _read_names(raw).type is not None:  # servers would take the last one, and might never answer
            raise ApiError(400, "type is given twice.", param="type")
        return CreateMessage(data, raw, None, prewarm=False)
    try:
        fields: dict[str, Any] = _fields(data)
        kind = msgspec.json.decode(fields.pop("type", b"null"))
        lane = msgspec.json.decode(fields.pop("stream_id", b"null"))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise malformed(data, error) from None
    if kind == CANCEL:
        return None
    if kind != CREATE:
        raise ApiError(
            400,
            f"The type of a message is response.create or response.cancel, not {shown(str(kind))!r}.",
            param="type",
        )
    if not (lane is None or (isinstance(lane, str) and 0 < len(lane) <= MAX_LANE)):
        raise ApiError(
            400,
            f"stream_id is a string of 1 to {MAX_LANE} characters, not {shown(str(lane))!r}.",
            param="stream_id",
        )
    prewarm = bytes(fields.pop("generate", b"")) == b"false"
    fields["stream"] = True
    return CreateMessage(data, _encode(fields), lane, prewarm)


def concerns_all(cancel: bytes) -> bool:
    """Whether a ``response.cancel`` names no response, and so means each that runs."""
    return _read_names(cancel).response_id is None


def _read_names(data: bytes) -> _Names:
    try:
        return _names(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # told when the request is read
        return _Names()
