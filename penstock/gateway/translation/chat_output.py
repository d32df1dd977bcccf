"""Reads the output of a chat completion, event by event or whole.

Servers differ: reasoning has two names or is a part of the content, calls come with and without an index or
an id, arguments as text or as an object. What cannot be read as an output is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.gateway.responses.event_reader import tidied
from penstock.gateway.responses.token_usage import MAX_TOKENS
from penstock.generation.dialect import CONTENT_FILTER
from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.replies.reply import ABORT
from penstock.generation.replies.token_usage import TokenUsage
from penstock.generation.request.schemas import Part
from penstock.http.errors import encode_json
from penstock.streaming.stream import StreamError

MAX_ITEMS = 4096
"""Texts, reasonings and calls of one output, each of which takes about 1 KB."""
UNREADABLE = "invalid_reply"
"""Code of errors about what is no chat completion."""


class TranslationError(Exception):
    """The reply is, or has, an error. ``own``: the server says so itself."""

    def __init__(self, error: StreamError, *, own: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.own = own


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    """``delta`` of an event, ``message`` of a whole reply."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None
    type: Any = None


_TOO_LONG = re.compile(
    r"\A(?!.*max_(?:completion_)?tokens.*too large)"
    r".*(?:context_length_exceeded|exceed_context_size|maximum context length|context size)",
    re.DOTALL,
)
"""What servers say of a prompt that is longer than the context: OpenAI and vLLM, llama.cpp. vLLM says another
thing of a limit of the output that is."""
_decode = msgspec.json.Decoder(_Chunk).decode
_FINISHES = {
    "length": b"length",
    "abort": ABORT,
    "content_filter": CONTENT_FILTER,
    "tool_calls": b"tool_calls",
    "function_call": b"tool_calls",
}


class ChatOutput:
    """The output so far. Only the first choice is read: there is one."""

    def __init__(self, format: MessageFormat) -> None:
        self.begun = False
        """Whether a choice has come."""
        self.finish_reason: bytes | None = None
        self.stop_sequence: str | None = None
        """The stop string that has ended the output, of servers that tell it."""
        self.usage: TokenUsage | None = None
        """The latest counts."""
        self._parser = MessageParser(format)
        self._items = 0
        """How many texts, reasonings and calls there are so far."""
        self._kind: int | None = None
        """What the latest of them is: a call by its number, text or reasoning."""
        self._call = -1
        """Number of the last call; -1: there was none."""
        self._place: int | None = None
        """Its index as the server has it."""
        self._id: str | None = None
        self._open = False
        """More of its arguments may come."""
        self._has_arguments = True
        """Whether it has any yet."""

    def read(self, data: bytes) -> Delta:
        """The next pieces of output, from an event's data or a whole body. Raises TranslationError."""
        try:
            chunk = _read(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _unreadable(f"no chat completion: {error}") from None
        if chunk.error or (not chunk.choices and chunk.usage is None and _says_error(chunk)):
            raise TranslationError(_server_error(chunk), own=True)
        if isinstance(chunk.usage, dict):
            self.usage = _usage(chunk.usage) or self.usage
        for choice in chunk.choices or ():
            if not choice.index and self.finish_reason is None:
                return self._add(choice)
        return Delta()

    def end(self) -> Delta:
        """The output has ended, in order; what was held back of it."""
        if self.finish_reason is None:
            self.finish_reason = b"stop"
        rest = self._parser.pass_on(Delta(calls=self._end_call()))
        rest.add(self._parser.push("", last=True))
        return rest

    def _add(self, choice: _Choice) -> Delta:
        self.begun = True
        message, whole = choice.delta or choice.message, choice.delta is None
        delta = Delta()
        if message is not None:
            read = self._pieces(message, whole=whole)
            self._count_items(read)
            delta = self._parser.pass_on(read)
        if choice.finish_reason == "error":
            raise TranslationError(StreamError(502, "upstream_failed", "The model server failed."), own=True)
        if choice.finish_reason:
            self.finish_reason = _FINISHES.get(choice.finish_reason, b"stop")
            if isinstance(choice.stop_reason, str) and self.finish_reason == b"stop":
                self.stop_sequence = choice.stop_reason
        return delta

    def _count_items(self, delta: Delta) -> None:
        for piece in delta.pieces:
            kind = piece.index if isinstance(piece, CallDelta) else -1 - piece.reasoning
            if kind != self._kind:
                self._kind = kind
                self._items += 1
        if self._items > MAX_ITEMS:
            raise _unreadable(f"one with more than {MAX_ITEMS} texts and calls")

    def _pieces(self, message: _Message, *, whole: bool) -> Delta:
        texts = Delta(reasoning=message.reasoning_content or message.reasoning or "")
        if isinstance(message.content, list):
            _add_parts(texts, message.content)
        else:
            texts.add_content(message.content or "")
        texts.add_content(message.refusal or "")
        delta = Delta()
        if texts:
            delta = Delta(calls=self._end_call())
            delta.add(texts)
        for call in message.tool_calls or ():
            for piece in self._call_pieces(call, new=whole):
                delta.add_call(piece)
        return delta

    # -- calls

    def _call_pieces(self, call: _Call, *, new: bool) -> Iterable[CallDelta]:
        function = call.function or _Function()
        name = function.name or None
        if new or self._begins(call, name):
            if name is None:
                raise _unreadable("a call without a name, or calls whose pieces are mixed")
            yield from self._end_call()
            self._call += 1
            self._place, self._id = call.index, call.id
            self._open, self._has_arguments = True, False
        elif not self._open:
            raise _unreadable("text between the pieces of a call")
        else:
            name = None
        given = function.arguments
        arguments = encode_json(given).decode() if isinstance(given, dict) else given or ""
        self._has_arguments = self._has_arguments or bool(arguments)
        if name is not None or arguments:
            yield CallDelta(self._call, name, arguments, call.id or None if name is not None else None)

    def _begins(self, call: _Call, name: str | None) -> bool:
        """Whether a piece begins a call: by its index, or by its id where all have the same index."""
        if self._call < 0 or (call.index is not None and call.index != self._place):
            return True
        return name is not None and bool(call.id) and call.id != self._id

    def _end_call(self) -> list[CallDelta]:
        """The last call has ended. Returns arguments for one that has none: clients read them as JSON."""
        self._open = False
        if self._has_arguments:
            return []
        self._has_arguments = True
        return [CallDelta(self._call, None, "{}")]


def _read(data: bytes) -> _Chunk:
    if not data.isascii():
        data.decode()
    try:
        return _decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return _decode(tidied(data))


def _unreadable(what: str) -> TranslationError:
    return TranslationError(StreamError(502, UNREADABLE, f"The model server's reply is {what}."))


def _add_parts(delta: Delta, parts: list[Any]) -> None:
    """Content as parts, which may be reasoning."""
    try:
        for part in msgspec.convert(parts, list[Part]):
            thought = part.thought()
            if thought is None:
                delta.add_content(part.value() or "")
            else:
                delta.add_reasoning(thought)
    except msgspec.ValidationError as error:
        raise _unreadable(f"no chat completion: {error}") from None


# -- errors


def _says_error(chunk: _Chunk) -> bool:
    """Whether an event or a body without choices is an error, as frameworks write them."""
    return chunk.object == "error" or isinstance(chunk.message, str)


def _server_error(chunk: _Chunk) -> StreamError:
    error: Any = chunk.error or {"message": chunk.message, "code": chunk.code, "type": chunk.type}
    return error_of(error, 502)


def error_of(error: Any, status: int) -> StreamError:
    """The error that a model server tells. ``status``: unless it is one itself."""
    fields = error if isinstance(error, dict) else {"message": error}
    message, code, kind = fields.get("message"), fields.get("code"), fields.get("type")
    if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
        status = code
    names = [str(each) for each in (code, kind) if isinstance(each, str) and each]
    param = fields.get("param")
    if any(_TOO_LONG.match(each[:1000]) for each in (*names, str(message))):
        param = "input_tokens"  # the clients' APIs have names of their own for it
    return StreamError(
        status,
        names[0] if names else "upstream_failed",
        message if isinstance(message, str) and message else "The model server failed.",
        param=param if isinstance(param, str) else None,
    )


# -- usage


def _usage(fields: dict[str, Any]) -> TokenUsage | None:
    prompt, completion = _count(fields.get("prompt_tokens")), _count(fields.get("completion_tokens"))
    if prompt is None and completion is None:
        return None
    prompt = prompt or 0
    cached = _count(_detail(fields, "prompt_tokens_details", "cached_tokens"))
    return TokenUsage(
        prompt,
        completion or 0,
        None if cached is None else min(cached, prompt),
        _count(_detail(fields, "completion_tokens_details", "reasoning_tokens")),
        min(prompt, _count(_detail(fields, "prompt_tokens_details", "image_tokens")) or 0),
    )


def _detail(fields: dict[str, Any], name: str, count: str) -> Any:
    details = fields.get(name)
    return details.get(count) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_TOKENS:
        return None
    return int(value)
