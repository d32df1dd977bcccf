"""Lines and whole replies of Ollama's generating routes."""

from __future__ import annotations

import time
from asyncio import Future
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from penstock.dialects.whole_calls import CallJoiner, WholeCall, whole_calls
from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import CallDelta, Delta, TextKind
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.reply import RequestReply
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.http.sink import LINES
from penstock.streaming.stream import StreamError

_NS = 1_000_000_000
_MORE = b',"done":false}\n'


class OllamaFields(NamedTuple):
    """What the reply needs of its request."""

    model: str
    """As the client calls it."""
    generate: bool
    """Whether it is a prompt's."""

    def start(self) -> bytes:
        """What every line begins with; the time is the reply's beginning."""
        return encode_json({"model": self.model, "created_at": shown_time(time.time())})[:-1] + b","

    def said(self, content: str, **more: Any) -> dict[str, Any]:
        """What the model has said."""
        if self.generate:
            return {"response": content, **more}
        return {"message": {"role": "assistant", "content": content, **more}}


class OllamaReply(ReplyFormat):
    """JSON objects, one a line: pieces of a message, and at the end counts and times."""

    __slots__ = ("_calls", "_fields", "_heads", "_reason", "_start", "_times", "id")

    api = "ollama"
    stream_kind = LINES
    keep_alive = LINES.filler

    def __init__(self, id: str, fields: OllamaFields) -> None:
        self.id = id
        self._fields = fields
        self._calls = CallJoiner()
        self._start = fields.start()
        empty = encode_json(fields.said(""))[1:]
        head = self._start + empty[: empty.index(b'""') + 1]
        self._heads = (head, head + b'","thinking":"')
        self._reason = b"stop"
        self._times = (0.0, 0.0)

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return self._heads[kind is not TextKind.CONTENT]

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return (b'"' if self._fields.generate else b'"}') + _MORE

    def text_open(self, index: int, kind: TextKind) -> bool:
        return True

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        return b""

    def event(self, index: int, content: EventContent) -> bytes:
        lines = [self._text(content.text)] if content.text else []
        for piece in () if content.delta is None else content.delta.pieces:
            if isinstance(piece, CallDelta):
                lines += self._called(self._calls.push(piece))
                continue
            kind = TextKind.REASONING if piece.reasoning else TextKind.CONTENT
            lines += self._called(self._calls.finish())
            lines.append(self._text(encode_json(piece.text)[1:-1], kind))
        if content.finish_reason is not None:
            lines += self._called(self._calls.finish())
            self._reason = content.finish_reason
        if content.logprobs is not None:  # of all tokens of these lines
            lines = lines or [self._text(b"")]
            entries = b"".join(content.logprobs.entries())
            lines[-1] = b'%b,"logprobs":%b%b' % (lines[-1].removesuffix(_MORE), entries, _MORE)
        return b"".join(lines)

    def _text(self, text: bytes, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b"".join((self.head(0, kind), text, self.tail()))

    def _called(self, call: WholeCall | None) -> list[bytes]:
        if call is None:
            return []
        fields = self._fields.said("", tool_calls=[_call(call)])
        return [self._start + encode_json(fields)[1:-1] + _MORE]

    def keep(self, reply: RequestReply) -> Future[None] | None:
        self._times = (reply.arrival, reply.first_token_at or reply.arrival)
        return None

    def end(self, usage: TokenUsage | None) -> bytes:
        assert usage is not None  # the plan asks for it
        return self._start + encode_json(self._fields.said("") | self._ending(usage))[1:] + b"\n"

    def error(self, error: StreamError) -> bytes:
        return encode_json({"error": stream_failed(error).message}) + b"\n"

    def _ending(self, usage: TokenUsage) -> dict[str, Any]:
        arrival, first_token_at = self._times
        now = time.monotonic()
        return {
            "done": True,
            "done_reason": "stop" if self._reason == b"tool_calls" else self._reason.decode(),
            "total_duration": int((now - arrival) * _NS),
            "load_duration": 0,  # it was loaded before
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int((first_token_at - arrival) * _NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((now - first_token_at) * _NS),
        }

    # -- replies that are not streamed

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        choice = reply.choices[0]
        delta = choice.take_delta() or Delta(content=choice.text.decode())
        more: dict[str, Any] = {"thinking": delta.reasoning} if delta.reasoning else {}
        if delta.calls:
            more["tool_calls"] = [_call(call) for call in whole_calls(delta.calls)]
        yield self._start + encode_json(self._fields.said(delta.content, **more))[1:-1]
        logprobs = None if choice.logprobs is None else choice.logprobs.take()
        if logprobs is not None:
            yield b',"logprobs":'
            yield from logprobs.entries()
        self._reason = choice.finish_reason
        yield b"," + encode_json(self._ending(reply.usage()))[1:]


def loaded(fields: OllamaFields, *, unload: bool) -> bytes:
    """The reply to a request that asks for nothing but to have the model loaded, or unloaded."""
    ending = {"done": True, "done_reason": "unload" if unload else "load"}
    return fields.start() + encode_json(fields.said("") | ending)[1:]


def shown_time(seconds: float) -> str:
    """Unix time as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _call(call: WholeCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": call.number, "name": call.name, "arguments": call.arguments}}
