"""How one row is sampled, written down plainly: one token after the other, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.wire.messages import SamplingParams

F64 = NDArray[np.float64]


def any_sampling(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Parameters of which each is at work in about a third of the streams."""
    some: dict[str, Any] = {
        "top_k": int(rng.integers(1, vocab)),
        "top_p": float(rng.uniform(0.05, 1)),
        "min_p": float(rng.uniform(0, 0.3)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "logit_bias": {int(token): float(rng.normal()) for token in rng.integers(0, vocab, 3)},
        "allowed_token_ids": tuple(rng.integers(0, vocab, vocab // 2 + 1).tolist()),
        "bad_words": tuple(tuple(rng.integers(0, min(vocab, 6), size).tolist()) for size in (1, 2, 3, 4)),
        "min_tokens": int(rng.integers(1, 12)),
        "stop_token_ids": tuple(rng.integers(0, vocab, max(1, vocab // 3)).tolist()),
        "logprobs": int(rng.integers(0, 4)),
    }
    chosen = {name: value for name, value in some.items() if rng.random() < 0.35}
    if rng.random() < 0.2:
        listed = tuple(rng.integers(0, vocab, int(rng.integers(1, 7))).tolist())
        chosen |= {"logprobs": len(listed), "logprob_token_ids": listed}
    return {
        "temperature": float(rng.choice([0.0, 0.5, 1.0, 1.7])),
        "seed": int(rng.integers(1 << 40)),
    } | chosen


def edited(
    logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> F64:
    """Logits after everything that comes before the temperature."""
    changed = np.array(logits, np.float64)
    if sampling.allowed_token_ids is not None:
        for token in range(len(changed)):
            if token not in sampling.allowed_token_ids:
                changed[token] = -np.inf
    for token, value in (sampling.logit_bias or {}).items():
        changed[token] += value
    if len(output) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            changed[token] = -np.inf
    for word in sampling.bad_words:
        start = list(word[:-1])
        if not start or list(output)[-len(start) :] == start:
            changed[word[-1]] = -np.inf
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token in output:
        changed[token] -= sampling.frequency_penalty
    for token in set(output):
        changed[token] -= sampling.presence_penalty
    return changed


def distribution(logits: F64, sampling: SamplingParams) -> F64:
    """Probabilities: temperature, then min-p, top-k, top-p, each on what the one before left."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return np.eye(len(logits))[int(logits.argmax())]
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights[weights < sampling.min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p]] = 0
    probabilities: F64 = weights / weights.sum()
    return probabilities
