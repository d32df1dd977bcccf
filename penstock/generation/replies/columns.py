"""Replies as columns, for programs: token ids and logprobs as a safetensors file, or as a stream of files.

A stream's event, here called a frame, is the length of a file (8 bytes, little-endian) and the file, with the
rows since the frame before. A length of 0 ends the stream. Frames have the tensors of a whole reply, and
which choices they are of; in their metadata what has become known. docs/columns.md tells clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import TextKind
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.reply import Choice, Prompt
from penstock.generation.replies.safetensors_writer import (
    SAFETENSORS,
    SafetensorsFile,
    Tensor,
    safetensors_file,
    tensor_of,
)
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError, encode_json, refused
from penstock.http.sink import StreamKind
from penstock.streaming.stream import StreamError
from penstock.streaming.weight_spans import WeightSpan
from penstock.wire.arrays import F32, I32

END = bytes(8)
"""The length that ends a stream."""


def framed(file: SafetensorsFile) -> bytes:
    """A frame of a stream."""
    return file.size.to_bytes(8, "little") + file.whole()


NOTHING = framed(safetensors_file((), {}))
"""A frame without rows."""
COLUMN_STREAM = StreamKind(
    [
        (b"content-type", SAFETENSORS + b"; frames=u64"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
    filler=NOTHING,
)


def plan_columns(plan: RequestPlan) -> None:
    """Have a request answered by columns. They have no text, so nothing is parsed; an echoed prompt is the
    prompt's own columns. Raises ApiError."""
    if plan.stream and plan.echo and plan.logprobs >= 0:
        raise refused("`echo` with `logprobs` is not available as columns when `stream=True`.", "echo")
    plan.columns = True
    if plan.base.routed_experts:
        raise refused("`return_routed_experts` is not available as columns.", "return_routed_experts")
    plan.return_token_ids |= plan.echo or plan.prompt_logprobs >= 0
    plan.echo, plan.echo_text, plan.format = False, "", None
    plan.include_usage = plan.stream


class ColumnsReply(ReplyFormat):
    """The reply to one request, of any API."""

    __slots__ = ("_created", "_model", "_n", "_started", "api", "id")

    fast_path = False
    sends_text = False
    sends_tokens = True
    stream_kind = COLUMN_STREAM
    keep_alive = NOTHING

    def __init__(self, own: ReplyFormat, plan: RequestPlan) -> None:
        """``own``: the format that the API has for the reply."""
        self.api, self.id = own.api, own.id
        self._created = int(time.time())
        self._model = plan.model
        self._n = plan.n
        self._started = False

    def _metadata(self, **fields: Any) -> dict[str, str]:
        """``__metadata__``: JSON by name, without what is None. The first one has the reply's id."""
        if not self._started:
            self._started = True
            fields |= {"id": self.id, "model": self._model, "created": self._created}
        return {name: encode_json(value).decode() for name, value in fields.items() if value is not None}

    # -- frames

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        return b""

    def event(self, index: int, content: EventContent) -> bytes:
        ids = np.array(content.token_ids or (), np.int32)
        tensors: list[Tensor] = []
        prompt = content.prompt_token_ids
        if prompt is not None and index % self._n == 0:
            column = np.array(prompt, np.int32)
            tensors += [
                _lengths("prompt_offsets", [column]),
                _index("prompts", index // self._n),
                tensor_of("prompt_token_ids", [column]),
            ]
        if len(ids):
            tensors += [_lengths("offsets", [ids]), _index("choices", index), tensor_of("token_ids", [ids])]
        if len(ids) and content.logprobs is not None:
            scored = content.logprobs.ids, content.logprobs.values
            _check_length(ids, len(scored[0]))
            tensors += _logprob_tensors("", len(ids), scored[0].shape[1] - 1, [scored])
        ended = None
        if content.finish_reason is not None:
            ended = [_ending(index, content.finish_reason, content.stop_reason, content.weight_versions)]
        metadata = self._metadata(choices=ended, usage=_usage(content.usage))
        if content.kv_transfer_params is not None:
            metadata["kv_transfer_params"] = content.kv_transfer_params.decode()
        return framed(safetensors_file(tensors, metadata))

    def end(self, usage: TokenUsage | None) -> bytes:
        return framed(safetensors_file((), self._metadata(usage=_usage(usage)))) + END

    def error(self, error: StreamError) -> bytes:
        fields = stream_failed(error).fields()
        return framed(safetensors_file((), self._metadata(error=fields))) + END

    # -- replies that are not streamed

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        return self.file(reply).pieces()

    def file(self, reply: CollectedReply) -> SafetensorsFile:
        """The body of a finished reply. Raises ApiError if the engine's logprobs are not those of the
        tokens."""
        plan, choices = reply.plan, reply.best_choices()
        ids = [_token_ids(choice) for choice in choices]
        tensors = [_lengths("offsets", ids)]
        prompts = [choice.prompt for choice in reply.choices[:: plan.n]]
        prompt_ids: list[I32] = []
        if plan.return_token_ids:
            prompt_ids = [np.frombuffer(prompt.ids, np.int32) for prompt in prompts]
            tensors.append(_lengths("prompt_offsets", prompt_ids))
        tensors.append(tensor_of("token_ids", ids))
        if plan.logprobs >= 0:
            for tokens, choice in zip(ids, choices, strict=True):
                _check_length(tokens, 0 if choice.logprobs is None else len(choice.logprobs))
            of_choices = _Scored(partial(_scored, choice, plan.logprobs) for choice in choices)
            tensors += _logprob_tensors("", sum(map(len, ids)), plan.logprobs, of_choices)
        if prompt_ids:
            tensors.append(tensor_of("prompt_token_ids", prompt_ids))
        if plan.prompt_logprobs >= 0:
            for tokens, prompt in zip(prompt_ids, prompts, strict=True):
                _check_length(tokens, 0 if prompt.logprobs is None else 1 + len(prompt.logprobs))
            of_prompts = _Scored(partial(_scored_prompt, prompt, plan.prompt_logprobs) for prompt in prompts)
            tensors += _logprob_tensors(
                "prompt_", sum(map(len, prompt_ids)), plan.prompt_logprobs, of_prompts
            )
        ended = [
            _ending(index, choice.finish_reason, choice.stop_reason, choice.weight_versions)
            for index, choice in enumerate(choices)
        ]
        metadata = self._metadata(choices=ended, usage=_usage(reply.usage()))
        transfer = reply.choices[0].kv_transfer_params
        if transfer is not None:
            metadata["kv_transfer_params"] = transfer.decode()
        return safetensors_file(tensors, metadata)


Scored: TypeAlias = tuple[I32, F32]
"""Candidates of consecutive tokens and their logprobs, [T, 1 + K] each: a token's own comes first."""


class _Scored:
    """Candidates of several outputs, or prompts, each made when it is first asked for."""

    def __init__(self, makers: Iterable[Callable[[], Scored]]) -> None:
        self._made: list[Scored | Callable[[], Scored]] = list(makers)

    def __iter__(self) -> Iterator[Scored]:
        for index, each in enumerate(self._made):
            if callable(each):
                self._made[index] = each = each()
            yield each


def _token_ids(choice: Choice) -> I32:
    return choice.id_column() if choice.ids else np.array(choice.tokens, np.int32)


def _scored(choice: Choice, alternatives: int) -> Scored:
    taken = None if choice.logprobs is None else choice.logprobs.take()
    if taken is None:
        shape = 0, 1 + alternatives
        return np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    return taken.ids, taken.values


def _scored_prompt(prompt: Prompt, alternatives: int) -> Scored:
    """The first token has no logprob: NaN."""
    assert prompt.logprobs is not None, "the request asks for them"
    first, ids, values = prompt.logprobs.echoed(alternatives)
    own = np.full((1, 1 + alternatives), -1, np.int32)
    none = np.full((1, 1 + alternatives), -np.inf, np.float32)
    own[0, 0], none[0, 0] = first, np.nan
    return np.concatenate((own, ids)), np.concatenate((none, values))


def _check_length(tokens: I32, scored: int) -> None:
    if len(tokens) != scored:
        message = f"The engine sent logprobs of {scored} of {len(tokens)} tokens."
        raise ApiError(500, message, code="engine_error")


def _logprob_tensors(prefix: str, rows: int, alternatives: int, scored: Iterable[Scored]) -> Iterator[Tensor]:
    """``scored`` is gone through once for each."""
    ids, values = np.dtype(np.int32), np.dtype(np.float32)
    yield Tensor(f"{prefix}logprobs", values, (rows,), (own[:, 0] for _, own in scored))
    if alternatives:
        shape = rows, alternatives
        yield Tensor(f"{prefix}top_ids", ids, shape, (top[:, 1:] for top, _ in scored))
        yield Tensor(f"{prefix}top_logprobs", values, shape, (own[:, 1:] for _, own in scored))


def _lengths(name: str, parts: Sequence[NDArray[Any]]) -> Tensor:
    """Where each part begins, and where the last one ends."""
    return tensor_of(name, [np.array([0, *accumulate(map(len, parts))], np.int64)])


def _index(name: str, index: int) -> Tensor:
    """Which choice, or prompt, the rows of a frame are of."""
    return tensor_of(name, [np.array([index], np.int32)])


def _ending(
    index: int, finish_reason: bytes, stop_reason: int | str | None, versions: Sequence[WeightSpan] | None
) -> Mapping[str, Any]:
    fields = {"index": index, "finish_reason": finish_reason.decode(), "stop_reason": stop_reason}
    return fields if versions is None else {**fields, "weight_versions": versions}


def _usage(usage: TokenUsage | None) -> Mapping[str, Any] | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
