"""``/generate``: SGLang's own API, for texts or token ids."""

from __future__ import annotations

import re
import time
from typing import Any, TypeVar

import msgspec

from penstock.config.serve import ServeConfig
from penstock.dialects.sglang.reply import ReplyFields, SglangReply
from penstock.dialects.sglang.request_schema import (
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    SglangRequest,
    SglangSampling,
)
from penstock.generation.dialect import NO_INFO, Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.prompts import parse_prompts
from penstock.generation.replies.logprobs import PIECE_CANDIDATES
from penstock.generation.request import validation
from penstock.generation.request.schemas import GenerateRequest, StructuredOutputs
from penstock.http.errors import ApiError, refused, shown

SAMPLING = "sampling_params"
DEFAULT_MAX_TOKENS = 128
"""SGLang's default."""
MAX_TOP = PIECE_CANDIDATES - 1
"""Maximum ``top_logprobs_num``: those of one token are made at once."""
TOKEN_BYTES, CANDIDATE_BYTES = 16, 48
"""Estimated bytes of a token's id and text, and of one logprob, in an event."""
_NAMES = {name: f"{SAMPLING}.{name}" for name in SglangSampling.__struct_fields__} | {
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "max_tokens": f"{SAMPLING}.max_new_tokens",
    "min_tokens": f"{SAMPLING}.min_new_tokens",
    "seed": f"{SAMPLING}.sampling_seed",
    "structured_outputs": SAMPLING,
    "structured_outputs.json": f"{SAMPLING}.json_schema",
    "structured_outputs.regex": f"{SAMPLING}.regex",
    "structured_outputs.grammar": f"{SAMPLING}.ebnf",
    "model": "lora_path",
}
"""This API's names of fields, by those of the fields that APIs share."""
_OWN_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.grammar": "ebnf",
}
_SHARED_NAMES = re.compile(rf"\b({'|'.join(map(re.escape, _OWN_NAMES))})\b")
"""Names in messages that are others here."""
_PER_PROMPT = (
    SAMPLING,
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "lora_path",
    "cache_salt",
    "extra_key",
)
"""Fields that may be a list, of a value for each prompt."""
T = TypeVar("T")


class SglangGenerate(Dialect):
    """SGLang's route."""

    path = "/generate"

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        self._processor = processor
        self._max_event = config.max_stream_backlog // 4
        self._decoder = processor.decoder(SglangRequest, id_field="input_ids", flat_ids=True)
        self._unsupported = processor.unsupported(UNSUPPORTED)
        self._unsupported_sampling = processor.unsupported(UNSUPPORTED_SAMPLING)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        arrival = time.monotonic()
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        prompts, batch = self._prompts(request)
        _check_lists(request, len(prompts))
        sampling = _one(request.sampling_params, SAMPLING) or SglangSampling()
        validation.check_streams(len(prompts), max(sampling.n or 1, 1), _prompt_field(request))
        try:
            self._unsupported_sampling.check_fields(sampling)
        except ApiError as error:
            error.param = f"{SAMPLING}.{error.param}"
            raise
        try:
            plan = self._plan(request, sampling, prompts, info)
        except ApiError as error:
            named = error.param or ""
            own = _NAMES.get(named) or _in_own_names(named)
            if own != named:
                error.message, error.param = _in_own_names(error.message), own
            raise
        if plan.constraint is not None:
            field = _NAMES.get(plan.constraint.field, plan.constraint.field)
            parts = tuple(part._replace(field=field) for part in plan.constraint.parts)
            plan.constraint = plan.constraint._replace(field=field, parts=parts)
        if plan.stream and not request.incremental_streaming_output:
            self._check_repeated(plan)
        start = _one(request.logprob_start_len, "logprob_start_len")
        plan.dialect_fields = ReplyFields(
            arrival=arrival,
            rids=_rids(request, len(prompts)),
            listed=batch or plan.n > 1,
            start=-1 if start is None else start,
            has_texts=bool(request.return_text_in_logprobs),
            incremental=bool(request.incremental_streaming_output),
            eos=self._processor.model_info.eos_token_ids,
        )
        return plan

    def _prompts(self, request: SglangRequest) -> tuple[list[str | bytes], bool]:
        """The prompts, and whether they are a list of them. Raises ApiError."""
        if (request.text is None) == (request.input_ids is None):
            raise ApiError(400, "Exactly one of text and input_ids is needed.", param="text")
        field = _prompt_field(request)
        given = request.text if field == "text" else request.input_ids
        vocab_size = self._processor.model_info.vocab_size
        prompts = list(parse_prompts(given, vocab_size, field))  # type: ignore[arg-type] # its kinds
        if field == "text":
            return prompts, isinstance(given, list)
        assert given is not None
        return prompts, len(prompts) > 1 or isinstance(given[0], list)

    def _plan(
        self,
        request: SglangRequest,
        sampling: SglangSampling,
        prompts: list[str | bytes],
        info: RequestInfo,
    ) -> RequestPlan:
        processor = self._processor
        model_info = processor.model_info
        logprobs, listed = self._logprobs(request)
        max_tokens = sampling.max_new_tokens
        if max_tokens is msgspec.UNSET:
            max_tokens = DEFAULT_MAX_TOKENS
        if max_tokens is not None:
            if max_tokens < 0:
                raise refused(
                    f"max_new_tokens must be at least 0, or null, got {shown(max_tokens)}.",
                    "max_new_tokens",
                    max_tokens,
                )
            max_tokens = min(max_tokens, model_info.max_model_len)
            if max_tokens:
                validation.check_max_tokens(max_tokens, model_info.max_model_len)
        plan = processor.plan(
            _shared_fields(request, sampling, listed), info.request_id, prompts, max_tokens, logprobs
        )
        plan.add_special_tokens = True
        plan.continuous_usage, plan.include_usage = True, False
        plan.return_token_ids = bool(request.return_prompt_token_ids)
        plan.return_weight_versions = True
        start = _one(request.logprob_start_len, "logprob_start_len")
        if logprobs >= 0 and start is not None and start >= 0:
            if listed:
                raise ApiError(
                    400,
                    "token_ids_logprob is for output tokens alone: logprob_start_len must be -1 with it.",
                    param="token_ids_logprob",
                )
            if plan.stream:
                raise ApiError(
                    400,
                    "logprob_start_len must be -1 with stream, as for the output alone.",
                    param="logprob_start_len",
                )
            plan.prompt_logprobs = logprobs
            plan.base = msgspec.structs.replace(plan.base, prompt_logprobs=logprobs)
        return plan

    def _logprobs(self, request: SglangRequest) -> tuple[int, list[int] | None]:
        """Alternatives per token, -1 for no logprobs, and the tokens that are asked for instead."""
        top = _one(request.top_logprobs_num, "top_logprobs_num") or 0
        listed = _ids_of_interest(request.token_ids_logprob)
        start = _one(request.logprob_start_len, "logprob_start_len")
        if start is not None and start < -1:
            raise ApiError(
                400, f"logprob_start_len must be at least -1, got {shown(start)}.", param="logprob_start_len"
            )
        if not _one(request.return_logprob, "return_logprob"):
            return -1, None
        if top and listed:
            raise ApiError(
                400,
                "token_ids_logprob takes the place of top_logprobs_num, which must be 0 with it.",
                param="token_ids_logprob",
            )
        processor = self._processor
        if top < 0:
            raise refused("top_logprobs_num must be at least 0.", "top_logprobs_num", top)
        most = min(processor.max_logprobs, MAX_TOP)
        return validation.resolve_logprobs(
            top, most, processor.model_info.vocab_size, "top_logprobs_num"
        ), listed

    def _check_repeated(self, plan: RequestPlan) -> None:
        """Raises ApiError if the last event, which has all that was generated, could be too large."""
        scored = CANDIDATE_BYTES * (1 + plan.logprobs) if plan.logprobs >= 0 else 0
        most = self._max_event // (TOKEN_BYTES + scored)
        if plan.base.max_tokens > most:
            raise ApiError(
                400,
                f"stream: events repeat all that was generated, here at most {most} tokens, but "
                f"max_new_tokens is {plan.base.max_tokens}. Send incremental_streaming_output: true, fewer "
                "max_new_tokens, or no stream.",
                param="stream",
            )

    def reply_format(self, plan: RequestPlan, request_id: str) -> SglangReply:
        return SglangReply(plan.request_id or request_id, plan)


def _in_own_names(text: str) -> str:
    """A message about shared fields in this API's names."""
    return _SHARED_NAMES.sub(lambda found: _OWN_NAMES[found[0]], text)


def _prompt_field(request: SglangRequest) -> str:
    """Which one has the prompts."""
    return "text" if request.input_ids is None else "input_ids"


def _check_lists(request: SglangRequest, prompts: int) -> None:
    """Raises ApiError for a list of values that has not one for each prompt."""
    for field in _PER_PROMPT:
        given = getattr(request, field)
        if isinstance(given, list) and len(given) != prompts:
            allowed = (
                f"one for each of {prompts} prompts" if prompts > 1 else "one, or no list, for one prompt"
            )
            raise ApiError(400, f"{field} is a list of {len(given)} values, not of {allowed}.", param=field)


def _one(value: T | list[T] | None, field: str) -> T | None:
    """A value that all prompts share. Raises ApiError for a list of different ones."""
    return _shared(value, field) if isinstance(value, list) else value


def _shared(values: list[T], field: str) -> T | None:
    if any(each != values[0] for each in values):
        raise ApiError(
            400,
            f"{field}: the prompts of a request have the same one here; send requests of their own.",
            param=field,
        )
    return values[0] if values else None


def _ids_of_interest(given: list[int | list[int]] | None) -> list[int] | None:
    """``token_ids_logprob``: ids, or such a list for each prompt."""
    if not given:
        return None
    lists = [each for each in given if isinstance(each, list)]
    if not lists:
        return [each for each in given if isinstance(each, int)]
    if len(lists) < len(given):
        raise ApiError(
            400, "token_ids_logprob must be a list of ids, or of lists of ids.", param="token_ids_logprob"
        )
    return _shared(lists, "token_ids_logprob") or None


def _rids(request: SglangRequest, prompts: int) -> tuple[str, ...]:
    """The id of each prompt, if there is one for each."""
    if not isinstance(request.rid, list):
        return ()
    if len(set(request.rid)) < prompts:
        raise ApiError(400, "rid has an id twice.", param="rid")
    return tuple(request.rid)


def _shared_fields(
    request: SglangRequest, sampling: SglangSampling, listed: list[int] | None
) -> GenerateRequest:
    """The request in the fields that APIs share, with SGLang's defaults."""
    outputs = None
    if sampling.json_schema or sampling.regex or sampling.ebnf:
        outputs = StructuredOutputs(
            json=sampling.json_schema or None, regex=sampling.regex or None, grammar=sampling.ebnf or None
        )
    salts = (_one(request.cache_salt, "cache_salt"), _one(request.extra_key, "extra_key"))
    return GenerateRequest(
        model=_one(request.lora_path, "lora_path"),
        stream=request.stream,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=-1 if sampling.top_k is None else sampling.top_k,
        min_p=0.0 if sampling.min_p is None else sampling.min_p,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        n=sampling.n,
        stop=sampling.stop or None,
        stop_token_ids=sampling.stop_token_ids or None,
        include_stop_str_in_output=sampling.no_stop_trim,
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias,
        logprob_token_ids=listed,
        structured_outputs=outputs,
        skip_special_tokens=sampling.skip_special_tokens,
        stream_interval=sampling.stream_interval,
        priority=None if request.priority is None else min(-request.priority, (1 << 63) - 1),
        request_id=request.rid if isinstance(request.rid, str) else None,
        cache_salt="\n".join([salt or "" for salt in salts]) if any(salts) else None,
        prompt_cache_key=request.session_id,
    )
