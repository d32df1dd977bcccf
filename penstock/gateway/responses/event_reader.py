"""What one event of a stream says: OpenAI's completions, chat and responses, Anthropic's messages.

One declared type covers all of them, because their field names do not collide; msgspec reads an event of
200 bytes into it in about a microsecond and checks its syntax on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.gateway.responses.token_usage import TokenUsage, UsageFields, read_usage

DONE = b"[DONE]"


class ContentError(ValueError):
    """Data that is not the JSON of any of the dialects."""


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


class _Response(msgspec.Struct, gc=False):
    """The object within an event of responses, or the message within one of messages."""

    usage: UsageFields | None = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    choices: list[_Choice] | None = None
    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    response: _Response | None = None
    message: msgspec.Raw = msgspec.Raw()


_event = msgspec.json.Decoder(_Event)
_delta = msgspec.json.Decoder(_Delta)
_response = msgspec.json.Decoder(_Response)


@dataclass(slots=True, frozen=True)
class ParsedEvent:
    """Of one event."""

    tokens: bool = False
    """It carries generated text, reasoning or tool arguments."""
    usage: TokenUsage | None = None
    usage_only: bool = False
    """It was sent for its usage alone (``choices`` is empty): the event that include_usage adds."""
    error: bytes | None = None
    """JSON of the error that it reports."""
    end: bool = False
    """The protocol's terminator."""


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
    """What an event with ``data`` and event field ``name`` means. Raises ContentError."""
    if data == DONE:
        return _END
    try:
        event = _read(data)
        return _parse_typed(event, name) if event.type or name else _parse_chunk(event)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ContentError(f"{error}: {data[:200]!r}") from None


def read_reply(body: bytes) -> ParsedEvent:
    """What a whole reply says, one that is not streamed. Raises ContentError."""
    try:
        event = _read(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ContentError(f"{error}: {body[:200]!r}") from None
    return ParsedEvent(usage=read_usage(event.usage), error=_error(event), end=True)


def _read(data: bytes) -> _Event:
    """Raises MsgspecError, UnicodeDecodeError."""
    if not data.isascii():
        data.decode()  # msgspec looks only at strings that it returns
    return _event.decode(data)


def _parse_chunk(event: _Event) -> ParsedEvent:
    """Of completions and chat."""
    choices = event.choices
    tokens = False
    for choice in choices or ():
        tokens = tokens or _has_tokens(choice)
    error = _error(event) if event.error else None
    if event.usage is None and error is None:
        if choices is None:
            raise ContentError("an event without choices, usage or error")
        return TOKENS_ONLY if tokens else EMPTY_EVENT
    return ParsedEvent(
        tokens=tokens,
        usage=read_usage(event.usage),
        usage_only=event.usage is not None and choices == [],
        error=error,
    )


def _parse_typed(event: _Event, name: bytes) -> ParsedEvent:
    """Of responses and messages; a server may leave the type to the event field."""
    kind = event.type or name.decode(errors="replace")
    usage = event.usage
    if event.response is not None:
        usage = event.response.usage
    elif kind == "message_start" and event.message:
        usage = _response.decode(event.message).usage
    error = None
    if kind in ("error", "response.failed") or _error(event) is not None:
        error = _error(event) or msgspec.json.encode({"type": kind})
    tokens = kind in _TOKENS
    if kind == "content_block_delta" and event.delta:
        tokens = _has_output(_delta.decode(event.delta))
    return ParsedEvent(tokens=tokens, usage=read_usage(usage), error=error, end=kind in _TERMINATORS)


def _has_tokens(choice: _Choice) -> bool:
    return bool(choice.text) or (choice.delta is not None and _has_output(choice.delta))


def _has_output(delta: _Delta) -> bool:
    """Whether it has something that was generated."""
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


def _error(event: _Event) -> bytes | None:
    raw = bytes(event.error)
    return None if raw in (b"", b"null") else raw
