"""Makes vLLM's EngineCoreRequest of a Submit, as vLLM's own front end would.

Sampling parameters are a map on the wire, so that they need no table of versions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.engine.attach.grammars import structured_outputs
from penstock.engine.attach.pooling.requests import pooling_params
from penstock.engine.base import RequestRejected
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.vllm.messages import ADD, encode

SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: keeps the seeds of resumed streams far apart."""
SEED_MASK = (1 << 63) - 1
MAX_TEMPERATURE = 2.0
MAX_LISTED_LOGPROBS = 128
"""MAX_LOGPROB_TOKEN_IDS of vllm/sampling_params.py: its sampler has room for as many."""
NO_WAVE = -1
"""The wave of a request, before any: an engine of a group that is between two waves reports a new one."""
_BEFORE_HINTS = (None, False, None, None, None, False)
"""Defaults of EngineCoreRequest's fields between priority and session_id."""
RESUMED_GRAMMAR = (
    "structured_outputs: the engine of this reply was lost, and vLLM's engine cannot continue a reply under "
    "a grammar; send the request again"
)


def encode_add(
    request_id: str,
    request: Submit,
    eos: Sequence[int],
    vocab_size: int,
    lora: Sequence[Any] | None = None,
    features: Sequence[Any] | None = None,
    *,
    hints: bool = False,
    type_ranges: bool = True,
) -> tuple[bytes, bytes]:
    """The frames that add a request. ``eos``: tokens that end outputs, the tokenizer's first; ``lora``:
    vLLM's LoRARequest; ``features``: of its pictures, see :mod:`.pictures`; ``hints``: whether its version
    knows session_id and kv_hints; ``type_ranges``: see :func:`.pooling.requests.pooling_params`. Raises
    RequestRejected."""
    pooling = request.pooling
    fields = [
        request_id,
        np.frombuffer(request.prompt, "<i4").tolist(),
        features,
        sampling_params(request, eos, vocab_size) if pooling is None else None,
        None if pooling is None else pooling_params(pooling, type_ranges=type_ranges),
        time.time(),
        lora,
        request.cache_salt,
        None,
        None,
        None,
        0,
        NO_WAVE,
        request.priority,
    ]
    if hints and request.hints is not None:
        given = request.hints.kv_hints
        fields += _BEFORE_HINTS
        fields += (request.hints.session, None if given is None else msgspec.json.decode(given))
    try:
        return ADD, encode(fields)
    except OverflowError:
        raise RequestRejected("kv_transfer_params: an integer of more than 64 bits") from None


def sampling_params(request: Submit, eos: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams that are not its defaults. Raises RequestRejected."""
    sampling, resumed = request.sampling, request.resumed
    _check_ranges(sampling)
    params: dict[str, Any] = {
        "detokenize": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": sampling.max_tokens - resumed,
        "min_tokens": min(max(sampling.min_tokens, resumed), sampling.max_tokens) - resumed,
        "ignore_eos": sampling.ignore_eos,
        **_stop_tokens(sampling, eos, vocab_size),
    }
    seed = seed_of(request)
    if seed is not None:
        params["seed"] = seed
    params |= _logprobs(sampling)
    if sampling.logit_bias:
        _check_ids("logit_bias", list(sampling.logit_bias), vocab_size)
        params["logit_bias"] = sampling.logit_bias
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise RequestRejected("allowed_token_ids: empty, but at least one token must be allowed")
        _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
        params["allowed_token_ids"] = sampling.allowed_token_ids
    if sampling.bad_words:
        _check_ids("bad_words", [token for word in sampling.bad_words for token in word], vocab_size)
        params["_bad_words_token_ids"] = sampling.bad_words
    if sampling.thinking is not None:
        params["thinking_token_budget"] = sampling.thinking.budget
    if sampling.grammar is not None:
        if resumed:
            raise RequestRejected(RESUMED_GRAMMAR, "engine_error")
        params["structured_outputs"] = structured_outputs(sampling.grammar)
    if request.kv_transfer_params is not None:
        transfer = msgspec.json.decode(request.kv_transfer_params)
        params["extra_args"] = {"kv_transfer_params": transfer}
    return params


def _logprobs(sampling: SamplingParams) -> dict[str, Any]:
    given = {"logprobs": sampling.logprobs, "prompt_logprobs": sampling.prompt_logprobs}
    fields: dict[str, Any] = {field: number for field, number in given.items() if number >= 0}
    if sampling.logprob_token_ids:
        fields["logprob_token_ids"] = sampling.logprob_token_ids
    return fields


def seed_of(request: Submit) -> int | None:
    """Return the seed for vLLM, whose random numbers depend on the number of tokens that it has drawn; None:
    the request has set none."""
    sampling = request.sampling
    return (sampling.seed + SEED_STEP * request.resumed) & SEED_MASK if sampling.seeded else None


def _stop_tokens(sampling: SamplingParams, eos: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """vLLM ends an output at ``_eos_token_id`` and ``stop_token_ids``; ``_all_stop_token_ids`` are those that
    min_tokens forbids."""
    first, others = list(eos[:1]), list(eos[1:])
    stop_ids = list(sampling.stop_token_ids)
    _check_ids("stop_token_ids", stop_ids, vocab_size)
    fields: dict[str, Any] = {"_all_stop_token_ids": sorted({*eos, *stop_ids})}
    if not sampling.ignore_eos:
        stop_ids = sorted({*stop_ids, *others})
        if first:
            fields["_eos_token_id"] = first[0]
    return fields | {"stop_token_ids": stop_ids}


def _check_ranges(sampling: SamplingParams) -> None:
    """Raises RequestRejected for what vLLM does not take: it decodes a request in the thread that receives
    all of them, which a refusal ends."""
    if not sampling.temperature <= MAX_TEMPERATURE:
        raise RequestRejected(
            f"temperature: {sampling.temperature:g}, but vLLM takes 0 to {MAX_TEMPERATURE:g}"
        )
    if not sampling.top_p > 0:
        raise RequestRejected("top_p: 0, but vLLM takes more than 0, up to 1")
    if len(sampling.logprob_token_ids) > MAX_LISTED_LOGPROBS:
        raise RequestRejected(
            f"logprob_token_ids: {len(sampling.logprob_token_ids)} token ids, but vLLM takes at most "
            f"{MAX_LISTED_LOGPROBS}"
        )
    if not math.isfinite(sampling.repetition_penalty):
        raise RequestRejected("repetition_penalty: not finite, but vLLM takes finite numbers above 0")


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestRejected for a token outside the vocabulary, with which vLLM's step would fail."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestRejected(f"{field}: token id {token}, but the vocabulary has {vocab_size}")
