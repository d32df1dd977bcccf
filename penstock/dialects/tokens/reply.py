"""Events and whole replies of ``/inference/v1/generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from penstock.dialects.openai_reply import DONE, usage_field, whole_usage_field
from penstock.dialects.token_list import token_list
from penstock.dialects.tokens.logprobs import entries_by_id
from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import TextKind
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.generation.replies.reply import Choice
from penstock.generation.replies.routed_experts import encoded
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.streaming.rows.token_fields import ItemKind, TokenFields
from penstock.streaming.stream import StreamError
from penstock.streaming.token_names import TokenNames
from penstock.streaming.token_table import escape_json


class TokensReply(ReplyFormat):
    """Choices are token ids."""

    __slots__ = ("_prefix", "_ranked", "created", "id", "model")

    api = "generate"
    sends_tokens = True
    sends_text = False
    mode: ClassVar[bytes] = b"tokens"
    text_start: ClassVar[bytes] = b""
    """JSON between a choice's index and its text."""
    text_end: ClassVar[bytes] = b""

    def __init__(self, id: str, plan: RequestPlan) -> None:
        self.id = id
        self.model = plan.model
        self.created = int(time.time())
        self._ranked = not plan.base.logprob_token_ids
        self._prefix = b'data: {"request_id":"%b","output_mode":"%b","choices":[' % (
            escape_json(id),
            self.mode,
        )

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b'%b{"index":%d%b' % (self._prefix, index, self.text_start)

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return self.text_end

    def token_fields(self, names: TokenNames, width: int, *, ids: bool) -> TokenFields | None:
        return _id_fields(self.text_start, self.text_end, names) if width == 0 else None

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        return b""

    def event(self, index: int, content: EventContent) -> bytes:
        parts = [
            b'%b%b%b,"token_ids":%b,"logprobs":'
            % (
                self.head(index),
                content.text if self.sends_text else b"",
                self.text_end,
                encode_json(content.token_ids or ()),
            )
        ]
        parts += (b"null",) if content.logprobs is None else self.logprobs(content.logprobs)
        if content.finish_reason is None:
            parts.append(b',"finish_reason":null}]')
        else:
            parts.append(b',"finish_reason":"%b"' % content.finish_reason)
            parts.append(b',"stop_reason":%b' % encode_json(content.stop_reason))
            if content.weight_versions:
                parts += (b',"weight_versions":', encode_json(content.weight_versions))
            parts.append(b"}]")
        if content.prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', encode_json(content.prompt_token_ids))
        if content.usage is not None:
            parts += (b',"usage":', encode_json(usage_field(content.usage)))
        if content.kv_transfer_params is not None:
            parts += (b',"kv_transfer_params":', content.kv_transfer_params)
        parts.append(b"}\n\n")
        return b"".join(parts)

    def end(self, usage: TokenUsage | None) -> bytes:
        if usage is None:
            return DONE
        return b'%b],"usage":%b}\n\n' % (self._prefix, encode_json(usage_field(usage))) + DONE

    def error(self, error: StreamError) -> bytes:
        return b"data: %b\n\n" % stream_failed(error).body()

    # -- logprobs

    def logprobs(self, logprobs: TokenLogprobs) -> Iterator[bytes]:
        """The field ``logprobs`` of a choice, in pieces: candidates by token id."""
        yield b'{"content":'
        yield from entries_by_id(logprobs, ranked=self._ranked)
        yield b"}"

    # -- replies that are not streamed

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        plan, first = reply.plan, reply.choices[0]
        start = {"request_id": self.id, "model": self.model, "created": self.created}
        usage = encode_json(whole_usage_field(reply.usage()))
        yield b'%b,"usage":%b,"prompt_logprobs":' % (encode_json(start)[:-1], usage)
        if first.prompt.logprobs is None:
            yield b"null"
        else:
            yield from first.prompt.logprobs.field()
        yield b',"prompt_token_id_logprobs":null,"prompt_token_ids":'
        yield from (
            token_list(np.frombuffer(first.prompt.ids, np.int32)) if plan.return_token_ids else (b"null",)
        )
        transfer = b"null" if first.kv_transfer_params is None else first.kv_transfer_params
        yield (
            b',"mm_placeholders":null,"metrics":null,"kv_transfer_params":%b,"ec_transfer_params":null,'
            b'"output_mode":"%b","choices":[' % (transfer, self.mode)
        )
        for index, choice in enumerate(reply.choices):
            yield from self._whole_choice(index, choice)
        yield b"]}"

    def _whole_choice(self, index: int, choice: Choice) -> Iterator[bytes]:
        ending: dict[str, Any] = {
            "index": index,
            "finish_reason": choice.finish_reason.decode(),
            "stop_reason": choice.stop_reason,
        }
        yield b'%b%b,"token_ids":' % (b"," if index else b"", encode_json(ending)[:-1])
        yield from token_list(choice.id_column() if choice.ids else choice.tokens)
        yield b',"routed_experts":'
        yield from (b"null",) if choice.routed_experts is None else encoded(choice.routed_experts)
        yield b',"sampling_mask":null,"weight_versions":' + encode_json(choice.weight_versions or None)
        yield from self.whole_content(choice)
        yield b',"logprobs":'
        logprobs = None if choice.logprobs is None else choice.logprobs.take()
        if logprobs is None:
            yield b"null"
        else:
            yield from self.logprobs(logprobs)
        yield b"}"

    def whole_content(self, choice: Choice) -> Iterator[bytes]:
        """Fields of a choice besides its tokens, each after a comma."""
        return iter(())


class TextReply(TokensReply):
    """Choices have the text of their tokens, too."""

    __slots__ = ()

    sends_text = True
    mode = b"text"
    text_start, text_end = b',"text":"', b'"'

    def logprobs(self, logprobs: TokenLogprobs) -> Iterator[bytes]:
        yield b'{"content":'
        yield from logprobs.entries()
        yield b"}"

    def whole_content(self, choice: Choice) -> Iterator[bytes]:
        yield b',"text":%b' % encode_json(choice.text.decode())


@lru_cache(maxsize=8)
def _id_fields(text_start: bytes, text_end: bytes, names: TokenNames) -> TokenFields:
    """The fields of events without logprobs."""
    lists = [(text_end + b',"token_ids":[', ItemKind.ID)]
    closing = b'],"logprobs":null,"finish_reason":null}]}\n\n'
    return TokenFields.make(lists, closing, names, 0, texts=bool(text_start))
