"""Events and whole replies of SGLang's ``/generate``.

SGLang's events repeat all that was generated so far. Their JSON is kept and added to, so that an event is
copied and not made anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.dialects.openai_reply import DONE
from penstock.dialects.token_list import token_list
from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import TextKind
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.generation.replies.reply import ABORT, Choice, Prompt, prompt_token_ids
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.text_places import TextPlaces
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.streaming.stream import StreamError
from penstock.streaming.token_names import TokenNames
from penstock.streaming.token_table import escape_json
from penstock.streaming.weight_spans import WeightSpan

UNKNOWN_VERSION = "default"
"""SGLang's name of weights without a version."""


class ReplyFields(NamedTuple):
    """What the reply needs of its request."""

    arrival: float
    """Monotonic seconds."""
    rids: tuple[str, ...]
    """One per prompt; empty: they are made from the reply's id."""
    listed: bool
    """Whether the reply is a list, and events have an index."""
    start: int
    """Place in the prompt from which its logprobs are returned; -1: they are not."""
    has_texts: bool
    """Whether logprobs have the texts of tokens."""
    incremental: bool
    """Whether events have only what is new."""
    eos: tuple[int, ...]


class Sent:
    """The JSON of what a choice has sent, without what encloses it."""

    __slots__ = ("count", "ids", "own", "text", "tops")

    def __init__(self) -> None:
        self.count = 0
        self.text, self.ids, self.own, self.tops = bytearray(), bytearray(), bytearray(), bytearray()

    def add(self, content: EventContent, own: bytes, tops: bytes) -> None:
        """The next text, tokens and logprobs; the latter with a comma after each token."""
        tokens = content.token_ids or ()
        self.text += content.text
        if tokens:
            self.ids += b"%b," % encode_json(tokens)[1:-1]
        self.own += own
        self.tops += tops
        self.count += len(tokens)

    def clear(self) -> None:
        """Forget it; the next event begins after it."""
        for part in (self.text, self.ids, self.own, self.tops):
            part.clear()


class SglangReply(ReplyFormat):
    """Choices are texts with token ids."""

    __slots__ = ("_cached", "_fields", "_plan", "_sent", "id")

    api = "sglang"
    fast_path = False
    sends_tokens = True
    usage_first = True

    def __init__(self, id: str, plan: RequestPlan) -> None:
        self.id = id
        self._plan = plan
        self._fields: ReplyFields = plan.dialect_fields
        self._sent: dict[int, Sent] = {}
        self._cached: dict[int, int] = {}

    def choice_ids(self, index: int) -> tuple[str, ...]:
        return (self._rid(index),)

    def _rid(self, index: int) -> str:
        rids, n = self._fields.rids, self._plan.n
        if rids:
            return rids[index // n] if n == 1 else f"{rids[index // n]}_{index % n}"
        return f"{self.id}_{index}" if self._fields.listed else self.id

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        if usage is not None and usage.cached_tokens:
            self._cached[index] = usage.cached_tokens
        return b""

    def event(self, index: int, content: EventContent) -> bytes:
        sent = self._sent.setdefault(index, Sent())
        assert content.usage is not None, "the plan asks for it in every event"
        pieces = [b"", b""] if content.logprobs is None else list(self._logprobs(content.logprobs))
        tops = b"".join(pieces[1::2])
        sent.add(content, b"".join(pieces[::2]), tops)
        finish = b"null"
        if content.finish_reason is not None:
            ids = content.token_ids or ()
            finish = self._finish(
                content.finish_reason, content.stop_reason, ids[-1:], content.usage.completion_tokens
            )
        meta = self._meta(index, finish, content.usage, self._cached.get(index, 0), content.weight_versions)
        parts = [b'data: {"text":"', bytes(sent.text), b'","output_ids":[', bytes(sent.ids[:-1])]
        parts += (b'],"meta_info":{', meta)
        if self._plan.logprobs >= 0:
            own, top = bytes(sent.own[:-1]), bytes(sent.tops[:-1])
            parts.append(
                b',"input_token_logprobs":[],"output_token_logprobs":[%b],"output_token_logprobs_length":%d'
                % (own, sent.count)
            )
            if field := self._tops_field("output"):
                parts += (self._tops_field("input"), b"[]", field, b"[%b]" % top)
        if content.finish_reason is not None:
            parts.append(self._latency())
        parts.append(b"}")
        parts.append(self._ending(index, content.prompt_token_ids))
        parts.append(b"}\n\n")
        if self._fields.incremental:
            sent.clear()
        return b"".join(parts)

    def end(self, usage: TokenUsage | None) -> bytes:
        return DONE

    def error(self, error: StreamError) -> bytes:
        return b"data: %b\n\n" % stream_failed(error).body()

    # -- fields

    def _finish(
        self, reason: bytes, stop_reason: int | str | None, last: Sequence[int], generated: int
    ) -> bytes:
        """The field ``finish_reason``. ``last``: the output's last token."""
        if reason == b"length":
            return b'{"type":"length","length":%d}' % generated
        if reason == ABORT:
            return b'{"type":"abort","message":"Aborted","status_code":null,"err_type":null}'
        matched: int | str | None = stop_reason
        if matched is None and last and last[-1] in self._fields.eos:
            matched = last[-1]
        return b'{"type":"stop","matched":%b}' % encode_json(matched)

    def _meta(
        self,
        index: int,
        finish: bytes,
        usage: TokenUsage,
        cached: int,
        versions: Sequence[WeightSpan] | None,
    ) -> bytes:
        version = versions[-1].version if versions else UNKNOWN_VERSION
        fields = (
            b'"id":"%b","finish_reason":%b,"prompt_tokens":%d,"weight_version":%b,"num_retractions":0,'
            b'"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":%d'
        ) % (
            escape_json(self._rid(index)),
            finish,
            usage.prompt_tokens,
            encode_json(version),
            usage.completion_tokens,
            cached,
        )
        return fields + b',"weight_versions":%b' % encode_json(versions) if versions else fields

    def _latency(self) -> bytes:
        return b',"e2e_latency":%b' % encode_json(time.monotonic() - self._fields.arrival)

    def _ending(self, index: int, prompt_ids: Sequence[int] | None) -> bytes:
        """Fields after ``meta_info``."""
        ids = b"" if prompt_ids is None else b',"prompt_token_ids":' + encode_json(prompt_ids)
        return ids + b',"index":%d' % index if self._fields.listed else ids

    # -- logprobs

    def _tops_field(self, of: str) -> bytes:
        """The name of the field with alternatives, after a comma; empty if there are none."""
        if self._plan.base.logprob_token_ids:
            return b',"%b_token_ids_logprobs":' % of.encode()
        return b',"%b_top_logprobs":' % of.encode() if self._plan.logprobs > 0 else b""

    def _logprobs(self, logprobs: TokenLogprobs) -> Iterator[bytes]:
        """By turns the logprobs of some tokens and those of their alternatives, each with a comma behind."""
        names = logprobs.names if self._fields.has_texts else None
        alternatives = self._plan.logprobs > 0
        for rows in logprobs.pieces():
            own, tops = [], []
            for ids, values in rows:
                own.append(_entry(names, ids[0], values[0]))
                if alternatives:
                    tops.append(_entries(names, ids, values))
            yield b"".join(own)
            yield b"".join(tops)

    def prompt_logprobs(self, prompt: Prompt, names: TokenNames, places: TextPlaces) -> Iterator[bytes]:
        """Fields with the logprobs of a prompt, in pieces, each field after a comma. ``places`` are not
        asked for."""
        start, tops = self._fields.start, self._tops_field("input")
        if start < 0 or prompt.logprobs is None or start >= prompt.length:
            yield b',"input_token_logprobs":[]'
            if tops:
                yield tops + b"[]"
            return
        _, ids, values = prompt.logprobs.echoed(self._plan.logprobs)  # from the second token on
        first = np.frombuffer(prompt.ids, "<i4")[start]
        rest = TokenLogprobs(names, ids[start:], values[start:], places)
        text = names[int(first)].quoted if self._fields.has_texts else b"null"
        yield b',"input_token_logprobs":[[null,%d,%b]' % (first, text)
        all_tops = []
        for number, piece in enumerate(self._logprobs(rest)):
            if number % 2:
                all_tops.append(piece[:-1])
            elif piece:
                yield b"," + piece[:-1]
        yield b"]"
        if tops:
            yield tops + b"[null"
            for piece in all_tops:
                yield b"," + piece
            yield b"]"

    # -- replies that are not streamed

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        names = reply.context.tables.names
        for index, choice in enumerate(reply.choices):
            if self._fields.listed:
                yield b"," if index else b"["
            yield from self._whole_choice(index, choice, names)
        if self._fields.listed:
            yield b"]"

    def _whole_choice(self, index: int, choice: Choice, names: TokenNames) -> Iterator[bytes]:
        yield b'{"text":%b,"output_ids":' % encode_json(choice.text.decode())
        yield from token_list(choice.tokens)
        usage = TokenUsage(choice.prompt.length, choice.generated, choice.cached)
        finish = self._finish(choice.finish_reason, choice.stop_reason, choice.tokens[-1:], choice.generated)
        yield b',"meta_info":{'
        yield self._meta(index, finish, usage, choice.cached, choice.weight_versions)
        if choice.logprobs is not None:
            yield from self.prompt_logprobs(choice.prompt, names, choice.logprobs.places)
            yield b',"output_token_logprobs":['
            logprobs, tops, comma = choice.logprobs.take(), [], b""
            for number, piece in enumerate(self._logprobs(logprobs) if logprobs is not None else ()):
                if number % 2:
                    tops.append(piece[:-1])
                else:
                    yield comma + piece[:-1]
                    comma = b","
            yield b'],"output_token_logprobs_length":%d' % len(choice.tokens)
            if field := self._tops_field("output"):
                yield field + b"["
                for number, piece in enumerate(tops):
                    yield b"," + piece if number else piece
                yield b"]"
        yield self._latency() + b"}"
        ids = prompt_token_ids(choice.prompt) if self._plan.return_token_ids else None
        yield self._ending(index, ids) + b"}"


def _entry(names: TokenNames | None, token: int, value: bytes) -> bytes:
    return b"[%b,%d,%b]," % (value, token, b"null" if names is None else names[token].quoted)


def _entries(names: TokenNames | None, ids: list[int], values: list[bytes]) -> bytes:
    """The alternatives of one token, which follow it in ``ids``."""
    shown = [
        _entry(names, token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0
    ]
    return b"[%b]," % b"".join(shown)[:-1]
