"""Decodes the messages of API servers and engines, and names what is wrong with one by its field."""

from __future__ import annotations

import re
from typing import Any, TypeGuard, TypeVar

import msgspec

from penstock.wire.media.items import PagePiece, media_fault
from penstock.wire.messages import (
    MAX_CALL_BYTES,
    Abort,
    ApplyStates,
    Disconnect,
    EngineMetricsQuery,
    FromEngine,
    FromServer,
    Hello,
    InvalidSubmit,
    RpcCall,
    SamplingParams,
    Submit,
    WireError,
)
from penstock.wire.pooling import columns_fault

_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

_REFUSALS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError)
"""What msgspec raises: UnicodeDecodeError for a string, the others within arguments and results of calls."""

Message = TypeVar("Message")


def decoded(decoder: msgspec.msgpack.Decoder[Message], part: bytes | memoryview, whose: str) -> Message:
    """Decode one message. Raises WireError, whose text names the message as "a message ``whose``"."""
    try:
        return decoder.decode(part)
    except _REFUSALS as error:
        raise WireError(f"not a message {whose}: {error}") from None


_MAX_BYTES: dict[type[msgspec.Struct], int] = {
    Hello: 1 << 12,
    Submit: 128 << 20,
    Abort: 1 << 20,
    Disconnect: 1 << 12,
    RpcCall: MAX_CALL_BYTES,
    EngineMetricsQuery: 1 << 12,
    ApplyStates: MAX_CALL_BYTES,
    PagePiece: 2 << 20,
}
"""Length of an API server's message; a request's body has at most 64 MiB (``--max-request-bytes``)."""
_OF_SERVER = {kind.__struct_config__.tag: kind for kind in _MAX_BYTES}
_ARRAY_HEADERS = {0xDC: 3, 0xDD: 5}
"""Length of an array's header by its first byte; 1 for short ones."""


def decode_from_server(part: bytes | memoryview) -> FromServer:
    """Decode one message of an API server. Raises WireError, and of that InvalidSubmit."""
    kind = _kind(part)
    if kind is None:
        raise WireError("it sent what is no message of an API server")
    if len(part) > _MAX_BYTES[kind]:
        raise WireError(f"its {kind.__name__} has {len(part)} bytes, at most {_MAX_BYTES[kind]} are taken")
    try:
        message = _from_server.decode(part)
    except msgspec.ValidationError as error:
        raise _out_of_bounds(part, kind, error) from None
    except _REFUSALS as error:
        raise WireError(f"its {kind.__name__} cannot be decoded: {error}") from None
    if isinstance(message, Submit):
        _check_prompts(message)
    return message


def _check_prompts(submit: Submit) -> None:
    if submit.pooling is None:
        reason = _prompt_fault(submit)
    else:
        reason = columns_fault(submit.pooling, submit.prompt, submit.sampling.max_tokens - submit.resumed)
        reason = reason or "choices of inputs" * bool(submit.choices)
    if reason:
        others = [(choice.stream, len(choice.output) // 4) for choice in submit.choices]
        raise InvalidSubmit(reason, [(submit.stream, submit.resumed), *others])


def _prompt_fault(submit: Submit) -> str:
    for prompt in [submit.prompt, *[choice.prompt for choice in submit.choices]]:
        if prompt is not None and (not prompt or len(prompt) % 4):
            return f"prompt has {len(prompt)} bytes, not a positive multiple of 4"
    for choice in submit.choices:
        if len(choice.output) % 4:
            return "output is not a multiple of 4 bytes"
    if not submit.media:
        return ""
    before = 0 if submit.prefix is None else submit.prefix.tokens
    return media_fault(submit.media, before + len(submit.prompt) // 4)


def _kind(part: bytes | memoryview) -> type[msgspec.Struct] | None:
    """The type of an API server's message, by its tag, before it is decoded."""
    at = _ARRAY_HEADERS.get(part[0], 1) if len(part) else 1
    return _OF_SERVER.get(part[at]) if len(part) > at else None


def _out_of_bounds(
    part: bytes | memoryview, kind: type[msgspec.Struct], error: msgspec.ValidationError
) -> WireError:
    """The error that names the field and its value in place of its index."""
    expected, _, path = str(error).partition(" - at `$")
    try:
        raw = msgspec.msgpack.decode(part)
    except _REFUSALS as refusal:
        return WireError(f"its {kind.__name__} cannot be decoded: {refusal}")
    if not isinstance(raw, list):
        return WireError("it sent what is no message of an API server")
    value: Any = raw
    name, fields = kind.__name__, ("", *kind.__struct_fields__)
    for index in map(int, re.findall(r"\[([0-9]+)\]", path)):
        value = value[index]
        if index < len(fields):
            name, fields = fields[index], ()
        if name == "sampling":
            fields = SamplingParams.__struct_fields__
    shown = f" {value}" if isinstance(value, (int, float)) else ""
    reason = f"{name}{shown}: {expected[:1].lower()}{expected[1:]}".replace("`", "")
    if kind is Submit and (streams := _streams_of(raw)) is not None:
        return InvalidSubmit(reason, streams)
    return WireError(f"its {kind.__name__} has {reason}")


def _streams_of(raw: list[Any]) -> list[tuple[int, int]] | None:
    """Handle and generated tokens of each stream of a Submit that is not valid; None if that cannot be
    told."""
    if len(raw) < 2 or not _is_count(raw[1]):
        return None
    resumed = raw[7] if len(raw) > 7 else 0
    streams = [(raw[1], resumed if _is_count(resumed) else 0)]
    choices = raw[11] if len(raw) > 11 else []
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, list) or not choice or not _is_count(choice[0]):
            return None
        output = choice[5] if len(choice) > 5 else b""
        streams.append((choice[0], len(output) // 4 if isinstance(output, bytes) else 0))
    return streams


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 31


def decode_from_engine(part: bytes | memoryview) -> FromEngine:
    """Decode one message of an engine, which may be the header of a token frame. Raises WireError."""
    return decoded(_from_engine, part, "of an engine")
