"""Validates a request against the model's limits before an engine queues it."""

from __future__ import annotations

import numpy as np

from penstock.engine.base import RequestRejected
from penstock.wire.messages import Submit


def check_request(request: Submit, max_model_len: int, vocab_size: int, *, has_routes: bool = False) -> None:
    """Raises RequestRejected for a prompt that leaves no room for output, token ids outside the vocabulary,
    there or among those to have logprobs, more logprobs than it has, a resumed stream whose output is
    complete, and routed experts unless the engine ``has_routes``."""
    length, limit = len(request.prompt) // 4, request.sampling.max_tokens
    if len(request.prompt) % 4 or not length or length < request.resumed:
        raise RequestRejected("prompt: at least one token, four bytes each, of which resumed are output")
    if length >= max_model_len:
        raise RequestRejected(
            f"prompt: {length} tokens leave no room for output; the model takes "
            f"{max_model_len} tokens, prompt and output together"
        )
    if limit <= request.resumed:
        raise RequestRejected(f"max_tokens: {limit}, but must be more than {request.resumed}")
    listed = request.sampling.logprob_token_ids
    if listed:
        if len(listed) != request.sampling.logprobs:
            raise RequestRejected(
                f"logprob_token_ids: {len(listed)} token ids, but {request.sampling.logprobs} logprobs"
            )
        if max(listed) >= vocab_size:
            raise RequestRejected(
                f"logprob_token_ids: token id {max(listed)}, but the vocabulary has {vocab_size}"
            )
    for field in ("prompt_logprobs",) if listed else ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(request.sampling, field)) > vocab_size:
            raise RequestRejected(f"{field}: {wanted}, but the vocabulary has {vocab_size} tokens")
    if request.sampling.routed_experts and not has_routes:
        raise RequestRejected("return_routed_experts: this engine has no model whose experts it can tell")
    prompt = np.frombuffer(request.prompt, "<u4")
    if prompt.max() >= vocab_size:  # as are negative ids, seen without their sign
        signed = prompt.view("<i4")
        token = int(signed.min()) if signed.min() < 0 else int(signed.max())
        raise RequestRejected(f"prompt: token id {token}, but the vocabulary has {vocab_size}")
