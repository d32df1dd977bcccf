"""Reads one event of a stream: OpenAI's completions, chat and responses, and Anthropic's messages.

One struct covers all of them, because their field names do not collide; msgspec decodes and checks an event
of 200 bytes in about a microsecond.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.gateway.responses.token_usage import TokenUsage, UsageFields, read_usage

DONE = b"[DONE]"


LARGE_BYTES = 64 << 10
"""Size of an event from which on its output is searched for instead of decoded."""
_find_output = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|refusal|thinking|partial_json)"\s*:\s*"[^"]'
    rb'|"tool_calls"\s*:\s*\[\s*[^\]\s]'
).search
"""Finds a field of :class:`_Delta` or :class:`_Choice` that is not empty."""
_find_finish = re.compile(rb'"finish_reason"\s*:\s*"[^"]').search


class ContentError(ValueError):
    """The data is not an event or reply of any of the dialects."""


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    # messages
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None


class _Response(msgspec.Struct, gc=False):
    """``response`` in an event of the responses API, ``message`` in one of the messages API."""

    usage: UsageFields | None = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    choices: list[_Choice] | None = None
    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    response: _Response | None = None
    message: msgspec.Raw = msgspec.Raw()


class _LargeEvent(msgspec.Struct, gc=False):
    """An event whose choices are not decoded: a million of them would take a second."""

    type: str = ""
    choices: msgspec.Raw = msgspec.Raw()
    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    response: _Response | None = None
    message: msgspec.Raw = msgspec.Raw()


class _Reply(msgspec.Struct, gc=False):
    """What is read of a reply that is not streamed; its choices may be many megabytes."""

    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()


_reply = msgspec.json.Decoder(_Reply)
_event = msgspec.json.Decoder(_Event)
_large_event = msgspec.json.Decoder(_LargeEvent)
_delta = msgspec.json.Decoder(_Delta)
_response = msgspec.json.Decoder(_Response)


@dataclass(slots=True, frozen=True)
class ParsedEvent:
    """Content of one event."""

    tokens: bool = False
    """It has generated text, reasoning or tool arguments."""
    usage: TokenUsage | None = None
    usage_only: bool = False
    """It has only usage (``choices`` is empty): the event that include_usage adds."""
    error: bytes | None = None
    """JSON of the error in it."""
    finish: bool = False
    """All choices in it have a finish reason."""
    end: bool = False
    """It terminates the stream."""


_TERMINATORS = {
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
    "message_stop",
}
_TOKENS = {
    "response.output_text.delta",
    "response.reasoning_text.delta",
    "response.function_call_arguments.delta",
}
EMPTY_EVENT = ParsedEvent()
TOKENS_ONLY = ParsedEvent(tokens=True)
_END = ParsedEvent(end=True)


def read_event(data: bytes, name: bytes = b"") -> ParsedEvent:
    """Parse an event with ``data`` and event field ``name``. Raises ContentError."""
    if data == DONE:
        return _END
    try:
        _check_encoding(data)
        event = _event.decode(data) if len(data) <= LARGE_BYTES else _read_large(data)
        return _parse_typed(event, name) if event.type or name else _parse_chunk(event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContentError(f"{error}: {data[:200]!r}") from None


def read_reply(body: bytes) -> ParsedEvent:
    """Parse the body of a reply that is not streamed. Raises ContentError."""
    try:
        _check_encoding(body)
        reply = _reply.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContentError(f"{error}: {body[:200]!r}") from None
    return ParsedEvent(usage=read_usage(reply.usage), error=_error(reply.error), end=True)


def _check_encoding(data: bytes) -> None:
    """msgspec checks the UTF-8 of decoded strings only. Raises UnicodeDecodeError."""
    if not data.isascii():
        data.decode()


def _read_large(data: bytes) -> _Event:
    """The event in ``data``, whose choices and delta stand for theirs. Raises msgspec's errors."""
    large = _large_event.decode(data)
    choices = None
    raw = bytes(large.choices) if large.choices else b"null"
    if raw.startswith(b"["):
        choice = _Choice("x" if _find_output(raw) else None, finish_reason=bool(_find_finish(raw)))
        choices = [choice] if raw.strip(b"[] \t\r\n") else []
    elif raw != b"null":
        raise msgspec.ValidationError("Expected `array | null` - at `$.choices`")
    delta = large.delta
    if len(delta) > LARGE_BYTES:
        delta = msgspec.Raw(b'{"text":"x"}' if _find_output(delta) else b"{}")
    return _Event(large.type, choices, large.usage, large.error, delta, large.response, large.message)


def _parse_chunk(event: _Event) -> ParsedEvent:
    """An event of completions or chat."""
    choices = event.choices
    tokens = False
    finish = bool(choices)
    for choice in choices or ():
        tokens = tokens or _has_tokens(choice)
        finish = finish and bool(choice.finish_reason)
    error = _error(event.error)
    if event.usage is None and error is None and not finish:
        if choices is None:
            raise ContentError("an event without choices, usage or error")
        return TOKENS_ONLY if tokens else EMPTY_EVENT
    return ParsedEvent(
        tokens=tokens,
        usage=read_usage(event.usage),
        usage_only=event.usage is not None and choices == [],
        error=error,
        finish=finish,
    )


def _parse_typed(event: _Event, name: bytes) -> ParsedEvent:
    """An event of responses or messages; servers may give the type in the event field only."""
    kind = event.type or name.decode(errors="replace")
    usage = event.usage
    if event.response is not None:
        usage = event.response.usage
    elif kind == "message_start" and event.message:
        usage = _response.decode(event.message).usage
    error = None
    if kind in ("error", "response.failed") or _error(event.error) is not None:
        error = _error(event.error) or msgspec.json.encode({"type": kind})
    tokens = kind in _TOKENS
    if kind == "content_block_delta" and event.delta:
        tokens = _has_output(_delta.decode(event.delta))
    return ParsedEvent(tokens=tokens, usage=read_usage(usage), error=error, end=kind in _TERMINATORS)


def _has_tokens(choice: _Choice) -> bool:
    return bool(choice.text) or (choice.delta is not None and _has_output(choice.delta))


def _has_output(delta: _Delta) -> bool:
    """Whether it has generated content."""
    return bool(
        delta.content
        or delta.reasoning
        or delta.reasoning_content
        or delta.refusal
        or delta.tool_calls
        or delta.text
        or delta.thinking
        or delta.partial_json
    )


def _error(raw: msgspec.Raw) -> bytes | None:
    error = bytes(raw) if raw else b"null"
    return None if error == b"null" else error
