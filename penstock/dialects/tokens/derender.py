"""``/v1/chat/completions/derender`` and ``/v1/completions/derender``: generated token ids as an API's reply.

The counterparts of the render routes: text, reasoning, calls and logprobs are what the API itself would have
replied to the request with these tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.dialects.tokens.derender_schema import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GeneratedChoice,
    GeneratedReply,
)
from penstock.generation.dialect import NO_INFO, Dialect, ReplyFormat, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan, constrain
from penstock.generation.prompt.prompts import check_vocabulary
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.reply import ABORT, Prompt, RequestContext, assemble
from penstock.generation.request.unsupported import UnsupportedField, UnsupportedFieldCheck, absent
from penstock.generation.request.validation import MAX_CHOICES, MAX_STREAMS
from penstock.http.errors import ApiError, not_served, shown
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs

SLICE_TOKENS = 1024
"""Tokens that become text at a time: about 1 ms."""
FINISH_REASONS = ("stop", "length", "abort", "tool_calls")
_OF_TOKENS = UnsupportedFieldCheck(
    (
        UnsupportedField("output_mode", lambda value: value == "tokens", "it must be tokens or absent"),
        UnsupportedField("prompt_logprobs", absent, "the generated reply has them already"),
    )
)
Body = TypeVar("Body", DerenderChatRequest, DerenderCompletionRequest)


class PromptOutput(NamedTuple):
    """What was generated for one prompt."""

    generated: GeneratedReply
    prompt: Prompt
    field: str
    """Its name in the request."""


class Derender(Dialect, Generic[Body]):
    """The derender route of an API."""

    renders = True

    def __init__(self, dialect: ChatCompletions | Completions, processor: InputProcessor) -> None:
        self.path = f"{dialect.path}/derender"  # type: ignore[misc] # one object per route
        self._dialect = dialect
        self._processor = processor

    @abstractmethod
    def _planned(self, body: bytes, info: RequestInfo) -> tuple[RequestPlan, list[PromptOutput]]:
        """The plan of the request that was rendered, and what was generated for it. Raises ApiError."""

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        plan, outputs = self._planned(body, info)
        for output in outputs:
            self._check(output, plan)
        constrain(plan, None)
        plan.prompts, plan.echo, plan.kept, plan.stream = (), False, None, False
        plan.prompt_logprobs = -1
        plan.n = 1  # the prompt of each choice is at hand
        plan.dialect_fields = outputs
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:
        outputs, plan.dialect_fields = plan.dialect_fields, None  # what a service tier would be
        format = self._dialect.reply_format(plan, request_id)
        plan.dialect_fields = outputs
        format.id = outputs[0].generated.request_id or format.id
        return format

    def rendered(
        self, plan: RequestPlan, prompts: Sequence[Prompt], request_id: str, context: RequestContext
    ) -> Iterator[bytes]:
        reply = DerenderedReply(context, plan, self.reply_format(plan, request_id), 0.0)
        eos = self._processor.model_info.eos_token_ids
        for output in plan.dialect_fields:
            for choice in output.generated.choices:
                for _ in reply.add_output(output, choice, eos):
                    yield b""
        yield from reply.format.whole(reply)

    def _check(self, output: PromptOutput, plan: RequestPlan) -> None:
        """Raises ApiError for an output that no model can have generated."""
        field, most = output.field, self._processor.model_info.max_model_len
        _OF_TOKENS.check_fields(output.generated)
        choices = output.generated.choices
        if not 1 <= len(choices) <= MAX_CHOICES:
            told = f"{field}.choices must have 1 to {MAX_CHOICES} choices, got {len(choices)}."
            raise ApiError(400, told, param=f"{field}.choices")
        for number, choice in enumerate(choices):
            name = f"{field}.choices[{number}]"
            if choice.index != number:
                told = f"{name}.index must be its place, {number}, got {shown(choice.index)}."
                raise ApiError(400, told, param=f"{name}.index")
            ids = choice.token_ids
            if not ids or len(ids) > most:
                told = f"{name}.token_ids must have 1 to {most} ids, got {len(ids or ())}."
                raise ApiError(400, told, param=f"{name}.token_ids")
            check_vocabulary(f"{name}.token_ids", max(ids), self._processor.model_info.vocab_size)
            if choice.finish_reason not in FINISH_REASONS:
                allowed = ", ".join(FINISH_REASONS)
                told = f"{name}.finish_reason must be {allowed}, got {shown(choice.finish_reason)!r}."
                raise ApiError(400, told, param=f"{name}.finish_reason")
            content = None if choice.logprobs is None else choice.logprobs.content
            if plan.logprobs >= 0 and [each.token_id for each in content or ()] != ids:
                told = f"{name}.logprobs.content must have an entry for each of token_ids, as asked for."
                raise ApiError(400, told, param=f"{name}.logprobs")

    def _output(
        self, generated: GeneratedReply, ids: list[int] | None, count: int | None, field: str, at: str
    ) -> PromptOutput:
        """``ids``, ``count``: of the prompt, as the request has them; ``at``: behind their names."""
        ids = generated.prompt_token_ids if ids is None else ids
        most = self._processor.model_info.max_model_len
        if len(ids or ()) > most:
            param = f"prompt_token_ids{at}"
            raise ApiError(400, f"{param} has {len(ids or ())} ids, at most {most} are allowed.", param=param)
        if ids:
            check_vocabulary(f"prompt_token_ids{at}", max(ids), self._processor.model_info.vocab_size)
        if count is not None and not 0 <= count <= most:
            param = f"prompt_tokens{at}"
            raise ApiError(400, f"{param} must be in [0, {most}], got {shown(count)}.", param=param)
        made = np.array(ids or (), "<i4").tobytes()
        return PromptOutput(generated, Prompt(made, len(ids or ()) if count is None else count), field)


class DerenderChat(Derender[DerenderChatRequest]):
    """Of chat completions."""

    def __init__(self, dialect: ChatCompletions, processor: InputProcessor) -> None:
        super().__init__(dialect, processor)
        self._plan = dialect.plan_request
        self._decoder = processor.decoder(DerenderChatRequest)

    def _planned(self, body: bytes, info: RequestInfo) -> tuple[RequestPlan, list[PromptOutput]]:
        request = self._decoder.decode(body)
        _check_whole(request)
        self._processor.check_model(request.model)
        field = "generate_response"
        output = self._output(
            request.generate_response, request.prompt_token_ids, request.prompt_tokens, field, ""
        )
        with _errors_within("chat_request"):
            _check_whole(request.chat_request)
            return self._plan(request.chat_request, info), [output]


class DerenderCompletions(Derender[DerenderCompletionRequest]):
    """Of completions."""

    def __init__(self, dialect: Completions, processor: InputProcessor) -> None:
        super().__init__(dialect, processor)
        self._plan = dialect.plan_request
        self._decoder = processor.decoder(DerenderCompletionRequest)

    def _planned(self, body: bytes, info: RequestInfo) -> tuple[RequestPlan, list[PromptOutput]]:
        request = self._decoder.decode(body)
        _check_whole(request)
        self._processor.check_model(request.model)
        replies = request.generate_responses
        count = len(replies)
        if not 1 <= count <= MAX_STREAMS:
            told = f"generate_responses must have 1 to {MAX_STREAMS} replies, got {count}."
            raise ApiError(400, told, param="generate_responses")
        ids: Sequence[list[int] | None] = request.prompt_token_ids or [None] * count
        counts: Sequence[int | None] = request.prompt_tokens or [None] * count
        for name, given in (("prompt_token_ids", ids), ("prompt_tokens", counts)):
            if len(given) != count:
                raise ApiError(400, f"{name} must be as many as generate_responses, {count}.", param=name)
        outputs = [
            self._output(each, ids[number], counts[number], f"generate_responses[{number}]", f"[{number}]")
            for number, each in enumerate(replies)
        ]
        with _errors_within("completion_request"):
            _check_whole(request.completion_request)
            plan = self._plan(request.completion_request, info)
        if len(plan.prompts) != count:
            told = f"generate_responses must have one reply per prompt, {len(plan.prompts)}, got {count}."
            raise ApiError(400, told, param="generate_responses")
        return plan, outputs


@contextmanager
def _errors_within(field: str) -> Iterator[None]:
    """Errors name fields of the request in ``field``."""
    try:
        yield
    except ApiError as error:
        error.param = field if error.param is None else f"{field}.{error.param}"
        raise


def _check_whole(
    request: DerenderChatRequest | DerenderCompletionRequest | ChatCompletionRequest | CompletionRequest,
) -> None:
    if request.stream:
        raise not_served("stream", "join the events of a stream, or stream from the API itself")


class DerenderedReply(CollectedReply):
    """A reply of tokens that were generated elsewhere; it has no streams."""

    def add_output(
        self, output: PromptOutput, generated: GeneratedChoice, eos: Sequence[int]
    ) -> Iterator[None]:
        """Add a choice, in steps that take about a millisecond."""
        self.add(output.prompt, 0)
        choice = self.choices[-1]
        choice.stream = None
        choice.tokens, choice.generated = generated.token_ids or [], len(generated.token_ids or ())
        choice.stop_reason = generated.stop_reason
        params = output.generated.kv_transfer_params
        choice.kv_transfer_params = None if params is None else msgspec.json.encode(params)
        if choice.logprobs is not None:
            choice.logprobs.add(choice.tokens, _logprobs(generated, self.plan.logprobs))
        finish = _finish(generated, eos)
        choice.assembler = self._assembler()
        for start in range(0, len(choice.tokens), SLICE_TOKENS):
            part = choice.tokens[start : start + SLICE_TOKENS]
            last = start + SLICE_TOKENS >= len(choice.tokens)
            reason = finish if last else FinishReason.NONE
            text = self._finished_text(part, reason)
            if choice.parsed is None:
                piece = assemble(choice.assembler, text, reason)
            else:
                piece = choice.parsed.add_tokens(choice.assembler, start, text, reason)
            choice.text += piece.text.encode()
            yield
            if piece.stop is not None:
                choice.stop_reason = piece.stop
                break
        choice.finish(_REASONS.get(finish, b"stop"))


_REASONS = {FinishReason.LENGTH: b"length", FinishReason.ABORT: ABORT}


def _finish(generated: GeneratedChoice, eos: Sequence[int]) -> FinishReason:
    """Why the output ended, as an engine says it."""
    if generated.finish_reason == "length":
        return FinishReason.LENGTH
    if generated.finish_reason == "abort":
        return FinishReason.ABORT
    if isinstance(generated.stop_reason, str):
        return FinishReason.GRAMMAR  # all tokens are text, within which the string is found
    last = (generated.token_ids or [-1])[-1]
    if generated.stop_reason == last:
        return FinishReason.STOP_TOKEN
    return FinishReason.EOS if last in eos else FinishReason.GRAMMAR


def _logprobs(generated: GeneratedChoice, alternatives: int) -> Logprobs:
    """The columns of a choice's logprobs, as an engine sends them: each token's own, then the alternatives in
    order, which have the token if it is among them."""
    content = [] if generated.logprobs is None else generated.logprobs.content or []
    ids = np.full((len(content), 1 + alternatives), -1, np.int32)
    values = np.full(ids.shape, -np.inf, np.float32)
    for row, entry in enumerate(content):
        ranked = [each for each in entry.top_logprobs if each.token_id != entry.token_id or each.rank]
        if any(each.rank for each in ranked):
            ranked.sort(key=lambda each: each.rank or len(ranked) + 1)
        kept = ranked[:alternatives]
        ids[row, : 1 + len(kept)] = [entry.token_id, *(each.token_id for each in kept)]
        values[row, : 1 + len(kept)] = [entry.logprob, *(each.logprob for each in kept)]
    place = np.arange(len(content), dtype=np.int32)
    return Logprobs(place, ids, values, np.ones(len(content), np.int32)).split()
