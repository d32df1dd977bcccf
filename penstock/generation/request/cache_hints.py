"""What a request says of the KV blocks of the requests that follow it: OpenAI's and vLLM's fields.

One number comes of all of them, the seconds for which its prompt and output are wanted after their last use.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.generation.request.schemas import GenerateRequest, PromptCacheOptions
from penstock.http.errors import ApiError, refused
from penstock.wire.messages import MAX_KEEP_S

MAX_KV_HINTS_BYTES = 16 << 10
"""Of JSON. vLLM's own are a list of few actions."""
_LIFETIME = re.compile(r"([1-9][0-9]{0,5})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_RETENTIONS = {"in_memory": 0, "in-memory": 0, "24h": MAX_KEEP_S}


class _Action(msgspec.Struct):
    """As vLLM has it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class _KVHints(msgspec.Struct):
    protocol_version: str
    message_id: str
    actions: Annotated[list[_Action], Meta(max_length=64)]


def lifetime_s(text: str, field: str) -> int:
    """Seconds of a lifetime such as ``5m``, at most a day. Raises ApiError."""
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise refused(f"{field} must be a lifetime, such as 5m, 30m, 1h or 24h.", field, text)
    return min(int(match[1]) * _SECONDS[match[2]], MAX_KEEP_S)


def keep_seconds(options: PromptCacheOptions | None, retention: str | None) -> int:
    """How long a request's blocks are wanted; 0: it does not say. Raises ApiError."""
    kept = 0
    if retention is not None:
        if retention not in _RETENTIONS:
            field = "prompt_cache_retention"
            raise refused(f"{field} must be in_memory or 24h.", field, retention)
        kept = _RETENTIONS[retention]
    if options is not None:
        if options.mode not in (None, "implicit", "explicit"):
            field = "prompt_cache_options.mode"
            raise refused(f"{field} must be implicit or explicit.", field, options.mode)
        if options.ttl is not None:
            kept = max(kept, lifetime_s(options.ttl, "prompt_cache_options.ttl"))
    return kept


def hints_of(request: GenerateRequest) -> tuple[int, bytes | None]:
    """How long a request's blocks are wanted, and JSON of its ``kv_hints``. Raises ApiError."""
    kept = keep_seconds(request.prompt_cache_options, request.prompt_cache_retention)
    return kept, None if not request.kv_hints else _kv_hints(request.kv_hints)


def _kv_hints(given: dict[str, Any]) -> bytes:
    try:
        msgspec.convert(given, _KVHints)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"kv_hints: {error}.", param="kv_hints") from None
    encoded = msgspec.json.encode(given)
    if len(encoded) > MAX_KV_HINTS_BYTES:
        message = f"kv_hints has {len(encoded)} bytes, at most {MAX_KV_HINTS_BYTES} are allowed."
        raise ApiError(400, message, param="kv_hints")
    return encoded
