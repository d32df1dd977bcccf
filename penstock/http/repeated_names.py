"""Finds names that a JSON object has twice; decoders take the last of them, or the first."""

from __future__ import annotations

import re

import msgspec

from penstock.http.errors import ApiError, shown

_WS = rb"[ \t\r\n]*"
_first = re.compile(_WS + rb"\{").match
_name = re.compile(_WS + rb'("(?:[^"\\]|\\.)*+")' + _WS + b":" + _WS, re.DOTALL).match
_end = re.compile(_WS + rb"([,}])").match
_decode_name = msgspec.json.Decoder(str).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_names(raw: bytes) -> None:
    """Refuse a JSON object that has a name twice. Raises ApiError, and msgspec's errors for what is none."""
    if (twice := repeated_name(raw, _fields(raw))) is not None:
        raise ApiError(400, f"{shown(twice)} is given twice.", param=shown(twice))


def repeated_name(raw: bytes, fields: dict[str, msgspec.Raw]) -> str | None:
    """A name that the object ``raw`` has twice. ``fields`` are the last ones of each name, so that values
    are stepped over, not parsed."""
    members = sum(map(len, fields)) + sum(map(len, fields.values())) + 4 * len(fields) + 1
    if len(raw) == members:
        return None  # without white space, nor room for more
    if len(raw) == members + 2 * len(fields) - 1 and raw == _dumped(fields):
        return None  # as Python's json.dumps writes it
    begin = _first(raw)
    at = len(raw) if begin is None else begin.end()
    seen = set[str]()
    while (found := _name(raw, at)) is not None:
        name = _decode_name(found[1])
        value = bytes(fields[name])
        after = _end(raw, found.end() + len(value)) if raw.startswith(value, found.end()) else None
        if after is None or name in seen:
            return name
        seen.add(name)
        at = after.end()
    return None


def _dumped(fields: dict[str, msgspec.Raw]) -> bytes:
    """The object with a space after each colon and comma, its names without escapes."""
    return b"{%b}" % b", ".join([b'"%b": %b' % (name.encode(), value) for name, value in fields.items()])
