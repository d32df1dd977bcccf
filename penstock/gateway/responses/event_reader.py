"""Reads one event of a stream: OpenAI's completions, chat and responses, and Anthropic's messages.

One struct covers all of them, because their field names do not collide; msgspec decodes and checks an event
of 200 bytes in about a microsecond. Servers have dialects of these APIs: what has another shape than expected
says nothing, and is no fault. Only what is no JSON of UTF-8 is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock.gateway.responses.token_usage import UsageFields

DONE = b"[DONE]"
LARGE_BYTES = 64 << 10
"""Size of an event from which on its output is searched for instead of decoded."""
_find_output = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|reasoning_details|refusal|thinking|thinking_blocks'
    rb'|partial_json|tool_calls|function_call|audio|images)"\s*:\s*(?:"[^"]|\[\s*[^\]\s]|\{\s*[^}\s])'
).search
"""Finds a field of :class:`_Delta` or :class:`_Choice` that is not empty."""
_find_finish = re.compile(rb'"finish_reason"\s*:\s*"[^"]').search
_find_failure = re.compile(rb'"finish_reason"\s*:\s*"error"').search
"""Finds a choice that has failed. Texts have their quotes escaped."""
_find_part = re.compile(rb'"text"\s*:\s*"[^"]|"functionCall"').search
"""Finds output of Gemini's."""
_replace_numbers = re.compile(rb"(?<=[:,\[ ])(?:NaN|-?Infinity)(?=\s*[,\]}])").sub
_replace_surrogates = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}").sub


class ContentError(ValueError):
    """The data is not an event or reply of any of the dialects. The message has none of it."""


class _Delta(msgspec.Struct, gc=False):
    """A delta whose fields have any types: content, for instance, is text, or a list of parts (Mistral)."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    images: Any = None
    # messages
    text: Any = None
    thinking: Any = None
    thinking_blocks: Any = None
    partial_json: Any = None
    stop_reason: Any = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: Any = None
    error: Any = None


class _Response(msgspec.Struct, gc=False):
    """``response`` in an event of the responses API, ``message`` in one of the messages API."""

    id: Any = None
    status: Any = None
    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Block(msgspec.Struct, gc=False):
    """``item`` in an event of the responses API, ``content_block`` in one of the messages API."""

    type: Any = None
    text: Any = None
    thinking: Any = None


class _BareError(msgspec.Struct, gc=False):
    """Fields of an error that is the event or the reply itself."""

    type: Any = None
    code: Any = None
    status_code: Any = None
    message: Any = None
    detail: Any = None  # FastAPI
    errors: Any = None


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    object: Any = None
    choices: list[_Choice] | None = None
    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    response: _Response | None = None
    item: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    content_block: msgspec.Raw = msgspec.Raw()
    # Gemini's
    candidates: msgspec.Raw = msgspec.Raw()
    usageMetadata: msgspec.Raw = msgspec.Raw()


class _LooseEvent(msgspec.Struct, gc=False):
    """An event whose fields are not decoded: a million choices would take a second, and those of a foreign
    shape would fail."""

    type: Any = None
    object: Any = None
    choices: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    item: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    content_block: msgspec.Raw = msgspec.Raw()
    candidates: msgspec.Raw = msgspec.Raw()
    usageMetadata: msgspec.Raw = msgspec.Raw()


class _Reply(msgspec.Struct, gc=False):
    """What is read of a reply that is not streamed; its choices may be many megabytes."""

    usage: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    choices: msgspec.Raw = msgspec.Raw()
    # responses; other APIs may have fields of these names and of any type
    id: Any = None
    object: Any = None
    status: Any = None
    # Ollama's
    prompt_eval_count: Any = None
    eval_count: Any = None
    usageMetadata: msgspec.Raw = msgspec.Raw()


class _UsageMetadata(msgspec.Struct, gc=False):
    """Gemini's."""

    promptTokenCount: int | None = None
    candidatesTokenCount: int | None = None
    thoughtsTokenCount: int | None = None
    cachedContentTokenCount: int | None = None


_json = msgspec.json.Decoder(msgspec.Raw)
_reply = msgspec.json.Decoder(_Reply)
_event = msgspec.json.Decoder(_Event)
_loose_event = msgspec.json.Decoder(_LooseEvent)
_delta = msgspec.json.Decoder(_Delta)
_response = msgspec.json.Decoder(_Response)
_block = msgspec.json.Decoder(_Block)
_usage = msgspec.json.Decoder(UsageFields)
_choices = msgspec.json.Decoder(list[_Choice])
_metadata = msgspec.json.Decoder(_UsageMetadata)
_bare_error = msgspec.json.Decoder(_BareError)
_first_of_list = re.compile(rb"\s*\[\s*\{").match
_errors = msgspec.json.Decoder(list[_Reply])
Shape = TypeVar("Shape")


class ParsedEvent(msgspec.Struct, frozen=True):
    """Content of one event."""

    tokens: bool = False
    """Whether the event has generated text, reasoning or tool arguments."""
    usage: UsageFields | None = None
    usage_only: bool = False
    """Whether the event has only usage (``choices`` is empty): the event that include_usage adds."""
    error: bytes | None = None
    """JSON of the error in it."""
    finish: bool = False
    """All choices in it have a finish reason."""
    end: bool = False
    """Whether the event terminates the stream."""
    response_id: str | None = None
    """Id of the response (of the responses API) that it belongs to."""
    deferred: bool = False
    """Whether the response goes on in the background; its usage comes later, elsewhere."""


_TERMINATORS = {
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
    "message_stop",
}
_FAILURES = {"response.failed", "response.error"}
_NAMES = ("response.", "message_", "content_block", "ping", "error")
"""With which the types of events of responses and messages begin."""
EMPTY_EVENT = ParsedEvent()
TOKENS_ONLY = ParsedEvent(tokens=True)
_END = ParsedEvent(end=True)


def read_event(data: bytes, name: bytes = b"") -> ParsedEvent:
    """Parse an event with ``data`` and event field ``name``. Raises ContentError."""
    if name == b"error" and not data.isspace():
        return ParsedEvent(error=data or b"{}")
    if data == DONE:
        return _END
    event = None
    if len(data) <= LARGE_BYTES:
        try:
            if not data.isascii():
                data.decode()  # msgspec checks the UTF-8 of decoded strings only
            event = _event.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if data.startswith(DONE):
                return _END
            if not data or data.isspace():
                return EMPTY_EVENT
    if event is None:
        event = _decode(_read_loosely, data)
    if event.candidates or event.usageMetadata:
        candidates = bytes(event.candidates)
        return ParsedEvent(
            tokens=bool(_find_part(candidates)),
            usage=_read_metadata(event.usageMetadata),
            finish=b'"finishReason"' in candidates,
        )
    if event.choices is None and (kind := _text(event.type) or name.decode(errors="replace")):
        if not kind.startswith(_NAMES) and (error := _itself(data)) is not None:
            return ParsedEvent(error=error)
        return _parse_typed(event, kind, data)
    return _parse_chunk(event, data)


def read_reply(body: bytes) -> ParsedEvent:
    """Parse the body of a reply that is not streamed. Raises ContentError."""
    reply = _decode(_read_reply, body)
    error, response_id, deferred = error_in(reply.error), None, False
    if reply.object == "response":
        response_id = _text(reply.id)
        deferred = reply.status in ("queued", "in_progress")
        if error is None and reply.status == "failed":
            error = b'{"status":"failed"}'
    elif reply.object == "error" or _have_failed(reply.choices):
        error = error or body
    elif error is None and not reply.choices:
        error = _itself(body, reply=True)
    usage = _shaped(_usage, reply.usage)
    if reply.usageMetadata:
        usage = _read_metadata(reply.usageMetadata)
    elif reply.eval_count is not None and usage is None:
        usage = UsageFields(prompt_tokens=reply.prompt_eval_count, completion_tokens=reply.eval_count)
    return ParsedEvent(usage=usage, error=error, end=True, response_id=response_id, deferred=deferred)


def read_error(body: bytes) -> bytes | None:
    """JSON of the error in a reply that has nothing else of a known shape; None: it says none."""
    try:
        reply = _decode(_read_reply, body)
    except ContentError:
        return None
    return error_in(reply.error) or (body if reply.object == "error" else None)


def _decode(read: Callable[[bytes], Shape], data: bytes) -> Shape:
    """What ``data`` holds. Raises ContentError."""
    try:
        if not data.isascii():
            data.decode()
        try:
            return read(data)
        except msgspec.DecodeError:
            if (better := tidied(data)) == data:
                raise
            return read(better)
    except UnicodeDecodeError as error:
        raise ContentError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ContentError(f"not JSON: {error}") from None


def tidied(data: bytes) -> bytes:
    """Rewrite the data as JSON of the standard: some servers write NaN or -Infinity for the logprob of what
    cannot come, or divide a pair of surrogates between two events. Texts matter only by being empty or
    not."""
    return _replace_surrogates(rb"\\ufffd", _replace_numbers(b"null", data))


def _read_loosely(data: bytes) -> _Event:
    """An event that is large, or has fields of foreign types. Raises msgspec's errors if it is not JSON."""
    try:
        loose = _loose_event.decode(data)
    except msgspec.ValidationError:
        _json.decode(data)
        return _Event()  # no object
    delta = loose.delta
    if len(delta) > LARGE_BYTES and bytes(delta).startswith(b"{"):
        delta = msgspec.Raw(b'{"text":"x"}' if _find_output(delta) else b"{}")
    return _Event(
        type=loose.type,
        object=loose.object,
        choices=_search_choices(bytes(loose.choices)),
        usage=_shaped(_usage, loose.usage),
        error=loose.error,
        delta=delta,
        response=_shaped(_response, loose.response),
        item=loose.item,
        message=loose.message,
        content_block=loose.content_block,
        candidates=loose.candidates,
        usageMetadata=loose.usageMetadata,
    )


def _search_choices(raw: bytes) -> list[_Choice] | None:
    """One choice that stands for all in ``raw``."""
    if not raw.startswith(b"["):
        return None
    if not raw.strip(b"[] \t\r\n"):
        return []
    finish = "error" if _find_failure(raw) else bool(_find_finish(raw))
    return [_Choice("x" if _find_output(raw) else None, finish_reason=finish)]


def _read_reply(body: bytes) -> _Reply:
    """Raises msgspec's errors if ``body`` is not JSON."""
    try:
        return _reply.decode(body)
    except msgspec.ValidationError:
        _json.decode(body)
        replies = _shaped(_errors, msgspec.Raw(body)) if _first_of_list(body) else None  # as Gemini writes it
        return replies[-1] if replies else _Reply()


def _read_metadata(raw: msgspec.Raw) -> UsageFields | None:
    counts = _shaped(_metadata, raw)
    if counts is None or counts.promptTokenCount is None:
        return None
    thoughts = counts.thoughtsTokenCount or 0
    return UsageFields(
        prompt_tokens=counts.promptTokenCount,
        completion_tokens=(counts.candidatesTokenCount or 0) + thoughts,
        prompt_tokens_details={"cached_tokens": counts.cachedContentTokenCount or 0},
        completion_tokens_details={"reasoning_tokens": thoughts},
    )


def _shaped(decoder: msgspec.json.Decoder[Shape], raw: msgspec.Raw) -> Shape | None:
    """What ``raw`` holds; None if it has another shape."""
    if not raw:
        return None
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError:
        return None


def _parse_chunk(event: _Event, data: bytes) -> ParsedEvent:
    """An event of completions or chat. Some have no choices: an error, or what a filter has found (Azure)."""
    choices = event.choices
    tokens = False
    finish = bool(choices)
    for choice in choices or ():
        tokens = tokens or _has_tokens(choice)
        finish = finish and bool(choice.finish_reason)
    error = error_in(event.error)
    if error is None and (event.object == "error" or any(map(_has_failed, choices or ()))):
        error = data
    elif error is None and not choices and event.usage is None:
        error = _itself(data)
    if event.usage is None and error is None and not finish:
        return TOKENS_ONLY if tokens else EMPTY_EVENT
    return ParsedEvent(
        tokens=tokens,
        usage=event.usage,
        usage_only=event.usage is not None and choices == [],
        error=error,
        finish=finish,
    )


def _parse_typed(event: _Event, kind: str, data: bytes) -> ParsedEvent:
    """An event of responses or messages; servers may give the type in the event field only."""
    usage, response, error = event.usage, event.response, error_in(event.error)
    if response is not None:
        usage = response.usage
    elif kind == "message_start" and (message := _shaped(_response, event.message)) is not None:
        usage = message.usage
    if kind == "response.failed" and response is not None:
        error = error or error_in(response.error)
    if (
        kind == "error" or kind in _FAILURES or (response is not None and response.status == "failed")
    ):  # the error of a response may be the event itself
        error = error or data
    tokens = _is_output(kind, event)
    end = kind in _TERMINATORS
    finish = kind == "message_delta" and _stops(event.delta)
    response_id = None if response is None else _text(response.id)
    if usage is None and error is None and response_id is None and not (end or finish):
        return TOKENS_ONLY if tokens else EMPTY_EVENT
    return ParsedEvent(
        tokens=tokens, usage=usage, error=error, finish=finish, end=end, response_id=response_id
    )


def _have_failed(raw: msgspec.Raw) -> bool:
    """Whether one of the choices of a whole reply has."""
    if len(raw) > LARGE_BYTES:
        return _find_failure(raw) is not None
    return any(map(_has_failed, _shaped(_choices, raw) or ()))


def _has_failed(choice: _Choice) -> bool:
    return choice.finish_reason == "error" or bool(choice.error)


def _itself(data: bytes, *, reply: bool = False) -> bytes | None:
    """``data`` if it is nothing but an error, as frameworks and proxies write them. A whole ``reply`` with a
    text as its message is one: those of the APIs have choices, output or content instead."""
    bare = _shaped(_bare_error, msgspec.Raw(data))
    if bare is None:
        return None
    kinds = (bare.type, bare.code, bare.status_code)
    says = isinstance(bare.message, str) and (reply or any(isinstance(kind, (str, int)) for kind in kinds))
    return data if says or bare.detail or bare.errors else None


def _is_output(kind: str, event: _Event) -> bool:
    """Whether an event of responses or messages has generated text, reasoning, or a tool call."""
    if kind.startswith("response."):
        if kind.endswith(".delta"):
            return bytes(event.delta) not in _NO_TEXT
        return kind == "response.output_item.added" and _begins_output(event.item)
    if kind == "content_block_delta":
        delta = _shaped(_delta, event.delta)
        return delta is not None and _has_output(delta)
    return kind == "content_block_start" and _begins_output(event.content_block)


_NO_TEXT = (b"", b'""', b"null")


def _stops(raw: msgspec.Raw) -> bool:
    """Whether the delta of a message has the reason for which it stops."""
    delta = _shaped(_delta, raw)
    return delta is not None and bool(delta.stop_reason)


def _begins_output(raw: msgspec.Raw) -> bool:
    """Whether an item or block begins with output: a tool call does, with the tool's name."""
    block = _shaped(_block, raw)
    if block is None:
        return False
    kind = _text(block.type) or ""
    return kind.endswith(("_call", "tool_use")) or bool(block.text or block.thinking)


def _has_tokens(choice: _Choice) -> bool:
    return bool(choice.text) or (choice.delta is not None and _has_output(choice.delta))


def _has_output(delta: _Delta) -> bool:
    """Whether it has generated content."""
    return bool(
        delta.content
        or delta.reasoning
        or delta.reasoning_content
        or delta.reasoning_details
        or delta.refusal
        or delta.tool_calls
        or delta.function_call
        or delta.audio
        or delta.images
        or delta.text
        or delta.thinking
        or delta.thinking_blocks
        or delta.partial_json
    )


_NO_ERROR = (b"", b"null", b"{}", b"[]", b'""', b"false", b"0")


def error_in(raw: msgspec.Raw) -> bytes | None:
    """The field ``error``; None: it says none."""
    error = bytes(raw)
    return None if error in _NO_ERROR else error


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
