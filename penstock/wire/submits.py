"""The streams of one request as one Submit.

A request with ``n`` or with several prompts has many streams, which share a schema, token lists and mostly
the prompt. These cross the wire once per engine, and the engine's streams refer to the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from penstock.wire.messages import CacheHints, Submit, SubmitChoice

CHOICE_SIZE = 32
"""Maximum encoded bytes of a SubmitChoice, without prompt and output."""
FIXED_SIZE = 256
"""Maximum encoded bytes of a Submit's fields of fixed size."""
TOKEN_SIZE = 5
"""Maximum encoded bytes of a token id."""


def join_submits(submits: Sequence[Submit]) -> Submit:
    """One Submit for streams of the same request: they differ at most in ``stream``, ``prompt``, ``resumed``
    and in the sampling parameters ``seed``, ``max_tokens`` and ``prompt_logprobs``."""
    first = submits[0]
    if len(submits) == 1:
        return first
    shared = prompt_without_output(first)
    choices = []
    for submit in submits[1:]:
        prompt = prompt_without_output(submit)
        choices.append(
            SubmitChoice(
                stream=submit.stream,
                seed=submit.sampling.seed,
                max_tokens=submit.sampling.max_tokens,
                prompt_logprobs=submit.sampling.prompt_logprobs,
                prompt=None if prompt is shared or prompt == shared else prompt,
                output=submit.prompt[len(prompt) :],
            )
        )
    return replace(first, choices=tuple(choices))


def split_submit(joined: Submit) -> Iterator[Submit]:
    """The streams of :func:`join_submits`, without ``choices``. What they share are the same objects."""
    if not joined.choices:
        yield joined
        return
    yield replace(joined, choices=())
    shared = prompt_without_output(joined)
    for choice in joined.choices:
        prompt = shared if choice.prompt is None else choice.prompt
        sampling = replace(
            joined.sampling,
            seed=choice.seed,
            max_tokens=choice.max_tokens,
            prompt_logprobs=choice.prompt_logprobs,
        )
        yield replace(
            joined,
            stream=choice.stream,
            prompt=prompt + choice.output if choice.output else prompt,
            sampling=sampling,
            resumed=len(choice.output) // 4,
            choices=(),
        )


def without_inputs(request: Submit, count: int) -> Submit:
    """A request for vectors without the first ``count`` inputs of its stream, which have been answered."""
    pooling = request.pooling
    assert pooling is not None
    done = 4 * (count - request.resumed)
    tokens = int(np.frombuffer(pooling.lengths[:done], "<i4").sum(dtype=np.int64))
    return replace(
        request,
        prompt=request.prompt[4 * tokens :],
        pooling=replace(pooling, lengths=pooling.lengths[done:], seconds=pooling.seconds[done:]),
        resumed=count,
    )


def shared_size(submit: Submit) -> int:
    """Estimated bytes of what the streams of a request share, without the prompt."""
    sampling, size = submit.sampling, FIXED_SIZE
    if sampling.stop_token_ids:
        size += TOKEN_SIZE * len(sampling.stop_token_ids)
    if sampling.logit_bias:
        size += 2 * TOKEN_SIZE * len(sampling.logit_bias)
    if sampling.allowed_token_ids:
        size += TOKEN_SIZE * len(sampling.allowed_token_ids)
    if sampling.logprob_token_ids:
        size += TOKEN_SIZE * len(sampling.logprob_token_ids)
    if (thinking := sampling.thinking) is not None:
        marks = (*thinking.starts, *thinking.ends, thinking.forced, thinking.again)
        size += TOKEN_SIZE * sum(map(len, marks))
    if sampling.bad_words:
        size += TOKEN_SIZE * sum(map(len, sampling.bad_words))
    for text in (sampling.grammar, submit.cache_salt, submit.kv_transfer_params):
        if text is not None:
            size += len(text)
    return size + hints_size(submit.hints) + sum(map(len, submit.ids))


def hints_size(hints: CacheHints | None) -> int:
    """Bytes of the texts of hints."""
    return 0 if hints is None else len(hints.session or "") + len(hints.kv_hints or b"")


def prompt_without_output(submit: Submit) -> bytes:
    """The prompt without the tokens at its end that another engine has generated."""
    return submit.prompt[: len(submit.prompt) - 4 * submit.resumed] if submit.resumed else submit.prompt
