"""``/v1/chat/completions/render`` and ``/v1/completions/render``: a request as one for token ids.

The reply is a body for ``/inference/v1/generate`` that has the same output, so a program can render here and
generate elsewhere, or at another time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.dialects.token_list import token_list
from penstock.generation.dialect import NO_INFO, Dialect, ReplyFormat, RequestInfo
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.reply import Prompt, RequestContext
from penstock.generation.request.unsupported import UnsupportedField, UnsupportedFieldCheck, absent
from penstock.http.errors import ApiError, encode_json
from penstock.wire.messages import SamplingParams

_NOT_TOKENS = "a request for token ids has no such field"
_UNSUPPORTED = UnsupportedFieldCheck(
    (
        UnsupportedField("best_of", lambda value: value == 1, _NOT_TOKENS),
        UnsupportedField("echo", absent, _NOT_TOKENS),
        UnsupportedField("return_token_offsets", absent, "they are not known here"),
    )
)
_DEFAULTS = SamplingParams(max_tokens=0, seed=0)
_RARE = (
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
)
"""Sampling parameters of the same name and meaning, which are left out where they change nothing."""


class Render(Dialect):
    """The render route of an API: the same body."""

    renders = True

    def __init__(self, dialect: ChatCompletions | Completions) -> None:
        self.path = f"{dialect.path}/render"  # type: ignore[misc] # one object per route
        self._dialect = dialect

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        request = self._dialect.decode(body)
        _UNSUPPORTED.check_fields(request)
        plan = self._dialect.plan_request(request, info)  # type: ignore[arg-type] # it has decoded it
        if plan.images:
            raise ApiError(
                400,
                f"{plan.images[0].field}: a request for token ids has no images; send the conversation to "
                f"{self._dialect.path} itself.",
                param=plan.images[0].field,
            )
        plan.dialect_fields = request
        _constraint_fields(request, plan)  # raises errors before anything is tokenized
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:
        return self._dialect.reply_format(plan, request_id)

    def rendered(
        self, plan: RequestPlan, prompts: Sequence[Prompt], request_id: str, context: RequestContext
    ) -> Iterator[bytes]:
        id = self._dialect.reply_format(plan, request_id).id
        if isinstance(plan.dialect_fields, ChatCompletionRequest):
            yield from _generate_request(plan, prompts[0], id)
            return
        for number, prompt in enumerate(prompts):
            yield b"," if number else b"["
            yield from _generate_request(plan, prompt, id if len(prompts) == 1 else f"{id}-{number}")
        yield b"]"


def _generate_request(plan: RequestPlan, prompt: Prompt, id: str) -> Iterator[bytes]:
    """The request for one prompt."""
    request: ChatCompletionRequest | CompletionRequest = plan.dialect_fields
    constraint = plan.constraint
    yield b'{"request_id":%b,"token_ids":' % encode_json(id)
    yield from token_list(np.frombuffer(prompt.ids, np.int32))
    fields: dict[str, Any] = {
        "token_offsets": None,
        "features": None,
        "sampling_params": _sampling_fields(plan, prompt.length),
        "model": plan.model,
        "reasoning_ended": None if constraint is None else not constraint.reasoning,
        "return_token_ids": request.return_token_ids,
        "stream": plan.stream,
        "stream_options": request.stream_options,
        "cache_salt": request.cache_salt,
        "priority": plan.priority,
        "kv_transfer_params": request.kv_transfer_params,
        "ec_transfer_params": None,
        "parse_context": None,
    }
    if isinstance(request, ChatCompletionRequest):
        fields["parse_context"] = {
            "tools": request.tools,
            "tool_choice": request.tool_choice or ("auto" if request.tools else "none"),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "include_reasoning": request.include_reasoning is not False,
            "chat_template_kwargs": request.chat_template_kwargs or {},
            "history_tool_call_cnt": sum(len(each.tool_calls or ()) for each in request.messages),
        }
    yield b"," + encode_json(fields)[1:]


def _sampling_fields(plan: RequestPlan, prompt_len: int) -> dict[str, Any]:
    """``sampling_params``, with the model's defaults: that route does not know them."""
    request: ChatCompletionRequest | CompletionRequest = plan.dialect_fields
    sampling = plan.sampling(prompt_len)
    fields: dict[str, Any] = {
        "n": plan.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed if sampling.seeded else None,
        "max_tokens": sampling.max_tokens,
        "stop": list(plan.stop),
        "include_stop_str_in_output": plan.include_stop_str,
        "skip_special_tokens": request.skip_special_tokens is not False,
        "bad_words": request.bad_words,
        "logprobs": plan.logprobs if plan.logprobs >= 0 else None,
        "prompt_logprobs": plan.prompt_logprobs if plan.prompt_logprobs >= 0 else None,
        "logprob_token_ids": sampling.logprob_token_ids or None,
        "stream_interval": request.stream_interval,
        "structured_outputs": _constraint_fields(request, plan),
    }
    for name in _RARE:
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            fields[name] = value
    return {name: value for name, value in fields.items() if value is not None}


def _constraint_fields(
    request: ChatCompletionRequest | CompletionRequest, plan: RequestPlan
) -> dict[str, Any] | None:
    """``structured_outputs`` for the plan's constraint, from whichever field it is. Raises ApiError."""
    constraint, format = plan.constraint, request.response_format
    if constraint is None:
        return None
    if constraint.field.startswith("structured_outputs"):
        given: dict[str, Any] = msgspec.to_builtins(request.structured_outputs)
        return {name: value for name, value in given.items() if value is not None}
    if constraint.field.startswith("response_format") and format is not None:
        schema = None if format.json_schema is None else format.json_schema.schema
        return {"json_object": True} if schema is None else {"json": schema}
    if constraint.kind == "json_schema":
        [part] = json.loads(constraint.grammar)["grammars"]
        return {"json": {name: value for name, value in part["json_schema"].items() if name != "x-guidance"}}
    if not constraint.grammar.startswith("{"):
        return {"grammar": constraint.grammar}
    if constraint.optional:  # strict tools are a help to the model; what it calls is parsed all the same
        return None
    raise ApiError(
        400,
        f"{constraint.field}: this grammar of tools cannot be written as structured_outputs, which a request "
        "for token ids has. Send tool_choice auto, or functions instead of custom tools.",
        param=constraint.field,
    )
