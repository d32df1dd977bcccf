"""Events and whole replies of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.dialects.openai_reply import OpenAIReply, usage_field
from penstock.generation.dialect import EventContent
from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.generation.replies.reply import Choice
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.streaming.rows.token_fields import ItemKind
from penstock.streaming.token_table import escape_json


class ChatReply(OpenAIReply):
    """A chat completion: choices are messages; the first event of each has the role."""

    __slots__ = ()

    api = "chat"

    event_object, body_object = "chat.completion.chunk", "chat.completion"
    text_start, text_end = b',"delta":{"content":"', b'"}'
    logprob_lists = ((b'"content":[', ItemKind.OBJECT),)
    prompt_in_choice = False
    whole_nulls = ((b"prompt_text", b"null"),)

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        extra = b"" if usage is None else b',"usage":' + encode_json(usage_field(usage))
        if prompt_token_ids is not None:
            extra += b',"prompt_token_ids":' + encode_json(prompt_token_ids)
        return (
            b'%b{"index":%d,"delta":{"role":"%b","content":""},"logprobs":null,"finish_reason":null}]%b}\n\n'
            % (self._prefix, index, escape_json(self.role), extra)
        )

    def event(self, index: int, content: EventContent) -> bytes:
        """One event for each kind of delta; the last one has all that is not text."""
        parts = [] if content.delta is None else content.delta.by_kind()
        if len(parts) < 2:
            return super().event(index, content)
        *firsts, content.delta = parts
        events = [super(ChatReply, self).event(index, EventContent(delta=each)) for each in firsts]
        return b"".join([*events, super().event(index, content)])

    def content(self, index: int, text: bytes, delta: Delta | None) -> bytes:
        if text:
            return b"".join((self.head(index), text, self.text_end))
        fields = b"{}" if delta is None else encode_json(delta_fields(delta))
        return b'%b{"index":%d,"delta":%b' % (self._prefix, index, fields)

    def logprobs(self, logprobs: TokenLogprobs) -> Iterator[bytes]:
        yield b'{"content":'
        yield from logprobs.entries()
        yield b"}"

    def choice_content(self, choice: Choice) -> dict[str, Any]:
        delta = choice.take_delta()
        if delta is None:
            delta = Delta(content=choice.prompt.echo + choice.text.decode())
        message = self.kept({"role": self.role, **message_fields(delta)})
        if self.strict:
            message["annotations"] = []  # OpenAI's schema has a list, or nothing
        return {"message": message}


def delta_fields(delta: Delta) -> dict[str, Any]:
    """The field ``delta`` of an event, without empty fields."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [_call_piece(call) for call in delta.calls]
    return fields


def message_fields(delta: Delta) -> dict[str, Any]:
    """The fields of a whole message after its role, in vLLM's order. Content is null if there are only calls
    or reasoning; ``tool_calls`` is absent without calls, as in OpenAI's and vLLM's APIs."""
    empty = None if delta.calls or delta.reasoning else ""
    fields: dict[str, Any] = {"content": delta.content or empty}
    fields |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    if delta.calls:
        fields["tool_calls"] = [{"id": call.id, **_call(call)} for call in delta.calls]
    fields["reasoning"] = delta.reasoning or None
    return fields


def _call_piece(call: CallDelta) -> dict[str, Any]:
    if call.name is not None:
        return {"index": call.index, "id": call.id, **_call(call)}
    if call.custom:
        return {"index": call.index, "custom": {"input": call.arguments}}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _call(call: CallDelta) -> dict[str, Any]:
    if call.custom:
        return {"type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
