"""Which stored response a request of the responses API names: only some endpoints have it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import msgspec

RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
_NO_IDS = frozenset({"", "compact", "input_tokens"})
"""Routes below :data:`RESPONSES` that name no response."""
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{36})[0-9a-f]{4}").fullmatch
"""An item of a Penstock server: the response's digits are part of its id."""
MAX_ID = 256
"""Characters of an id; a longer one is none."""


class _Reference(msgspec.Struct):
    type: Any = None
    id: Any = None


_decode_id = msgspec.json.Decoder(str).decode
_decode_input = msgspec.json.Decoder(list[_Reference]).decode


def response_in_path(path: str) -> str | None:
    """The id of the response that a path is about."""
    below, _, _ = path.removeprefix(RESPONSES + "/").partition("/")
    if below == path or below in _NO_IDS or len(below) > MAX_ID:
        return None
    return unquote(below)


def response_in_body(previous: bytes, input: bytes) -> str | None:
    """The id of the response that a request continues (``previous``, JSON), or one of whose items it refers
    to in its ``input``. What is malformed is left to the server."""
    try:
        if previous.startswith(b'"'):
            id = _decode_id(previous)
            return id if 0 < len(id) <= MAX_ID else None
        if b"item_reference" not in input:
            return None
        ids = [each.id for each in _decode_input(input) if each.type == "item_reference"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = (_ITEM_ID(id) for id in ids if isinstance(id, str))
    return next((f"resp_{match[1]}" for match in found if match is not None), None)
