"""Events and whole replies of Gemini's ``generateContent``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.dialects.gemini.conversation import signature
from penstock.dialects.gemini.errors import error_body
from penstock.dialects.whole_calls import CallJoiner, WholeCall
from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import CallDelta, Delta, TextDelta, TextKind
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.generation.replies.reply import Choice
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.http.sink import ARRAY, EVENT_STREAM
from penstock.streaming.stream import StreamError

_REASONS = {b"length": "MAX_TOKENS", b"abort": "OTHER"}
_decode = msgspec.json.Decoder().decode


class GeminiFields(NamedTuple):
    """What the reply needs of its request."""

    model: str
    thoughts: bool
    """Whether reasoning is shown."""
    events: bool
    """Whether a stream is server-sent events; otherwise it is one JSON array."""


class _Parts:
    """The parts of one candidate."""

    def __init__(self, *, thoughts: bool) -> None:
        self._thoughts = thoughts
        self._calls = CallJoiner()
        self._reasoning: list[str] = []

    def push(self, pieces: Iterable[TextDelta | CallDelta], *, last: bool) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if isinstance(piece, CallDelta):
                yield from self._call(self._calls.push(piece))
                continue
            yield from self._call(self._calls.finish())
            if not piece.reasoning:
                yield {"text": piece.text}
                continue
            self._reasoning.append(piece.text)
            if self._thoughts:
                yield {"thought": True, "text": piece.text}
        if last:
            yield from self._call(self._calls.finish())

    def _call(self, call: WholeCall | None) -> Iterator[dict[str, Any]]:
        if call is None:
            return
        part: dict[str, Any] = {"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}}
        if self._reasoning:
            part["thoughtSignature"] = signature("".join(self._reasoning))
            self._reasoning.clear()
        yield part


class GeminiReply(ReplyFormat):
    """Candidates, each with parts of text, reasoning and calls."""

    __slots__ = ("_begun", "_ending", "_fields", "_parts", "_reasons", "id", "keep_alive", "stream_kind")

    api = "gemini"

    def __init__(self, id: str, fields: GeminiFields) -> None:
        self.id = id
        self._fields = fields
        self.stream_kind = EVENT_STREAM if fields.events else ARRAY
        self.keep_alive = b": keep-alive\n\n" if fields.events else b" "
        self._ending = encode_json({"modelVersion": fields.model, "responseId": id})[1:]
        self._begun = False
        self._parts: dict[int, _Parts] = {}
        self._reasons: dict[int, bytes] = {}

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        start = b"data: " if self._fields.events else b""
        part = b'"text":"' if kind is TextKind.CONTENT else b'"thought":true,"text":"'
        return b'%b{"candidates":[{"index":%d,"content":{"role":"model","parts":[{%b' % (start, index, part)

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b'"}]}}],%b%b' % (self._ending, self._separator)

    @property
    def _separator(self) -> bytes:
        return b"\n\n" if self._fields.events else b",\n"

    def text_open(self, index: int, kind: TextKind) -> bool:
        return kind is TextKind.CONTENT

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        opens = not (self._fields.events or self._begun)
        self._begun = True
        return b"[" if opens else b""

    def event(self, index: int, content: EventContent) -> bytes:
        if content.finish_reason is not None:
            self._reasons[index] = content.finish_reason
        if content.delta is None and content.logprobs is None:
            return b"".join((self.head(index), content.text, self.tail())) if content.text else b""
        text = _decode(b'"%b"' % content.text) if content.text else ""
        delta = Delta(content=text) if content.delta is None else content.delta
        last = content.finish_reason is not None
        parts = list(self._of(index).push(delta.pieces, last=last))
        if not parts and content.logprobs is None:
            return b""
        candidate = {"index": index, "content": {"role": "model", "parts": parts or [{"text": ""}]}}
        if content.logprobs is not None:
            candidate |= _logprobs(content.logprobs)
        return self._chunk(candidates=[candidate])

    def _of(self, index: int) -> _Parts:
        return self._parts.setdefault(index, _Parts(thoughts=self._fields.thoughts))

    def _chunk(self, **fields: Any) -> bytes:
        start = b"data: " if self._fields.events else b""
        return b"%b%b,%b%b" % (start, encode_json(fields)[:-1], self._ending, self._separator)

    def end(self, usage: TokenUsage | None) -> bytes:
        assert usage is not None  # the plan asks for it
        empty = {"role": "model", "parts": [{"text": ""}]}
        candidates = [
            {"index": index, "content": empty, "finishReason": _REASONS.get(reason, "STOP")}
            for index, reason in sorted(self._reasons.items())
        ]
        chunk = self._chunk(candidates=candidates, usageMetadata=_usage(usage))
        return chunk if self._fields.events else chunk.removesuffix(b",\n") + b"]\n"

    def error(self, error: StreamError) -> bytes:
        """Clients look for an error that is not in an event."""
        body = error_body(stream_failed(error))
        if self._fields.events:
            return body + b"\n\n"
        return (b"" if self._begun else b"[") + body + b"]\n"

    # -- replies that are not streamed

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        yield b'{"candidates":['
        for index, choice in enumerate(reply.choices):
            yield (b"," if index else b"") + encode_json(self._candidate(index, choice))
        yield b'],"usageMetadata":%b,%b' % (encode_json(_usage(reply.usage())), self._ending)

    def _candidate(self, index: int, choice: Choice) -> dict[str, Any]:
        delta = choice.take_delta() or Delta(content=choice.text.decode())
        parts = list(self._of(index).push(delta.pieces, last=True)) or [{"text": ""}]
        reason = _REASONS.get(choice.finish_reason, "STOP")
        content = {"role": "model", "parts": parts}
        candidate: dict[str, Any] = {"index": index, "content": content, "finishReason": reason}
        logprobs = None if choice.logprobs is None else choice.logprobs.take()
        return candidate if logprobs is None else candidate | _logprobs(logprobs)


def _usage(usage: TokenUsage) -> dict[str, Any]:
    thoughts = usage.reasoning_tokens or 0
    counts: dict[str, Any] = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - thoughts,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.image_tokens:
        kinds = {"TEXT": usage.prompt_tokens - usage.image_tokens, "IMAGE": usage.image_tokens}
        counts["promptTokensDetails"] = [
            {"modality": kind, "tokenCount": count} for kind, count in kinds.items()
        ]
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    return counts | {"thoughtsTokenCount": thoughts} if thoughts else counts


def _logprobs(logprobs: TokenLogprobs) -> dict[str, Any]:
    entries = _decode(b"".join(logprobs.entries()))

    def spelled(entry: dict[str, Any]) -> dict[str, Any]:
        return {"token": entry["token"], "logProbability": entry["logprob"]}

    tops = [{"candidates": [spelled(each) for each in entry["top_logprobs"]]} for entry in entries]
    result = {"chosenCandidates": [spelled(entry) for entry in entries], "topCandidates": tops}
    values = [entry["logprob"] for entry in entries if entry["logprob"] is not None]
    average = {"avgLogprobs": sum(values) / len(values)} if values else {}
    return {**average, "logprobsResult": result}
