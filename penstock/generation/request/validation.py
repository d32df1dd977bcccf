"""Checks the sampling fields of a request and makes its SamplingParams. Messages are vLLM's if it has any."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite

from msgspec.structs import replace

from penstock.generation.model_info import ModelInfo
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.generation.request.schemas import GenerateRequest
from penstock.http.errors import ApiError, refused, shown
from penstock.wire.logprobs import ENTRY_CANDIDATES
from penstock.wire.messages import MAX_LISTED_LOGPROBS, SamplingParams

GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as 0, as in vLLM."""
MIN_TEMPERATURE = 0.01
"""Minimum of other temperatures, as in vLLM: logits divided by less overflow in 16 bits."""
MAX_CHOICES = 1024
"""Maximum ``n``, so that one request cannot start any number of streams."""
MAX_STREAMS = 4096
"""Maximum streams of one request, prompts times ``n``, for the same reason."""
SEED_MASK = (1 << 63) - 1
MAX_BAD_WORDS = 1024
"""Maximum texts in ``bad_words``: each is tokenized, and compared with the output at every step."""
MAX_BAD_WORDS_CHARACTERS = 1 << 14
"""Maximum characters of all ``bad_words`` together: tokenizing them takes up to 0.5 us each (measured)."""
MAX_STOP_CHARACTERS = 1024
"""Maximum characters of a ``stop`` string: so many may be held back while they could be part of one."""
MAX_STREAMED_CANDIDATES = 1 << 16
"""Maximum logprobs of a streamed token, and of an echoed prompt in a stream: they are one event, which takes
about 40 ms to format."""
MAX_LOGPROB_BYTES = 128 << 20
"""Bytes of logprobs that may be held for all requests with more per token than an entry of a frame has."""
CANDIDATE_BYTES = 8
"""Memory of one held logprob: its token's id and its value."""
MAX_BIAS = 100.0
"""Logit biases are clamped to ± this value, as OpenAI documents."""

_NOTHING = (None,) * 8


def parse_sampling_params(
    request: GenerateRequest,
    model_info: ModelInfo,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    seed: int,
    logprobs: int,
) -> SamplingParams:
    """The sampling parameters of ``request``, with the model's defaults. Raises ApiError.

    ``max_tokens``, ``logprobs``: already checked, as :class:`SamplingParams` has them. ``seed``: used if the
    request has none.
    """
    r, defaults = request, model_info.defaults
    temperature = defaults.temperature if r.temperature is None else r.temperature
    if not 0.0 <= temperature < 1e30:
        raise _bad_temperature(temperature)
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    elif temperature < MIN_TEMPERATURE:
        temperature = MIN_TEMPERATURE
    top_p = defaults.top_p if r.top_p is None else r.top_p
    if not 0.0 < top_p <= 1.0:
        raise refused(f"top_p must be in (0, 1], got {shown(top_p)}.", "top_p", top_p)
    top_k = defaults.top_k if r.top_k is None else r.top_k
    if top_k < -1:
        raise refused(f"top_k must be 0 (disable), or at least 1, got {shown(top_k)}.", "top_k", top_k)
    min_p = defaults.min_p if r.min_p is None else r.min_p
    if not 0.0 <= min_p <= 1.0:
        raise ApiError(400, f"min_p must be in [0, 1], got {min_p}.", param="min_p")
    if r.n is not None and r.n != 1:
        _check_n(r.n, temperature)
    min_tokens = r.min_tokens or 0
    if min_tokens:
        check_min_tokens(min_tokens, max_tokens)
    seeded = r.seed is not None and r.seed != -1
    if r.seed is not None and seeded:
        seed = r.seed & SEED_MASK
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k == -1 or top_k >= model_info.vocab_size else top_k,
        min_p=min_p,
        repetition_penalty=defaults.repetition_penalty,
        min_tokens=min_tokens,
        ignore_eos=bool(r.ignore_eos),
        logprobs=logprobs,
        seeded=seeded,
    )
    rare = (
        r.repetition_penalty,
        r.presence_penalty,
        r.frequency_penalty,
        r.stop_token_ids,
        r.logit_bias,
        r.allowed_token_ids,
        r.bad_words,
        r.logprob_token_ids,
    )
    return sampling if rare == _NOTHING else _with_rare_fields(sampling, r, model_info, tokenizer)


def _with_rare_fields(
    sampling: SamplingParams, r: GenerateRequest, model_info: ModelInfo, tokenizer: Tokenizer
) -> SamplingParams:
    repetition = sampling.repetition_penalty if r.repetition_penalty is None else r.repetition_penalty
    if not 0.0 < repetition < 1e30:
        raise ApiError(
            400,
            f"repetition_penalty must be greater than zero, got {repetition}.",
            param="repetition_penalty",
        )
    presence = _penalty("presence_penalty", r.presence_penalty)
    frequency = _penalty("frequency_penalty", r.frequency_penalty)
    size = model_info.vocab_size
    sampling = replace(
        sampling,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        stop_token_ids=_token_ids("stop_token_ids", r.stop_token_ids or (), size),
        logit_bias=_logit_bias(r.logit_bias, size),
        allowed_token_ids=_allowed(r.allowed_token_ids, size),
        bad_words=_bad_words(r.bad_words or (), tokenizer),
    )
    if r.logprob_token_ids:
        listed = _listed_logprobs(r.logprob_token_ids, size)
        sampling = replace(sampling, logprobs=len(listed), logprob_token_ids=listed)
    if r.allowed_token_ids is not None or r.bad_words or sampling.min_tokens:
        _check_tokens_left(sampling, model_info)
    return sampling


def _check_tokens_left(sampling: SamplingParams, model_info: ModelInfo) -> None:
    """Raises ApiError, which names the fields, if they exclude every token from the start."""
    allowed = sampling.allowed_token_ids
    excluded = {word[0] for word in sampling.bad_words if len(word) == 1}
    fields = ["allowed_token_ids"] if allowed is not None else []
    fields += ["bad_words"] if excluded else []
    if sampling.min_tokens:
        fields += ["min_tokens", "stop_token_ids"] if sampling.stop_token_ids else ["min_tokens"]
        excluded.update(model_info.eos_token_ids, sampling.stop_token_ids)
    universe = range(model_info.vocab_size) if allowed is None else allowed
    if all(token in excluded for token in universe):
        names = " and ".join(fields)
        raise ApiError(
            400, f"{names} contradict each other: together they allow no token at the start.", param=names
        )


def _bad_temperature(value: float) -> ApiError:
    if isfinite(value) and value < 0:
        return refused(f"temperature must be non-negative, got {shown(value)}.", "temperature", value)
    return refused(f"temperature must be a finite number, got {shown(value)}.", "temperature", value)


def _penalty(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not -2.0 <= value <= 2.0:
        raise ApiError(400, f"{name} must be in [-2, 2], got {shown(value)}.", param=name)
    return value


def _check_n(n: int, temperature: float) -> None:
    if n < 1:
        raise refused(f"n must be at least 1, got {shown(n)}.", "n", n)
    if n > MAX_CHOICES:
        raise refused(f"n must be at most {MAX_CHOICES}, got {shown(n)}.", "n", n)
    if temperature == 0.0:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {shown(n)}.", param="n")


def check_streams(prompts: int, n: int, field: str = "prompt") -> None:
    """Raises ApiError if ``prompts`` with ``n`` choices each are too many streams for one request.
    ``field``: the request's name of the prompts."""
    if prompts * n > MAX_STREAMS:
        raise ApiError(
            400,
            f"{field}: {prompts} prompts with n={n} are {prompts * n} outputs, at most {MAX_STREAMS} are "
            "allowed in one request.",
            param=field,
        )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises ApiError unless ``min_tokens`` is at least 0 and at most ``max_tokens``."""
    if min_tokens < 0:
        raise ApiError(
            400,
            f"min_tokens must be greater than or equal to 0, got {shown(min_tokens)}.",
            param="min_tokens",
        )
    if min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {shown(min_tokens)}.",
            param="min_tokens",
        )


def check_max_tokens(value: int, max_model_len: int, field: str = "max_tokens") -> None:
    """Raises ApiError unless ``value`` is at least 1 and at most ``max_model_len``."""
    if value < 1:
        raise refused(f"{field} must be at least 1, got {shown(value)}.", field, value)
    if value > max_model_len:
        raise refused(
            f"{field}={shown(value)} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            field,
            value,
        )


def check_prompt_len(prompt_len: int, max_model_len: int) -> None:
    """Raises ApiError unless a prompt of ``prompt_len`` tokens leaves room for one output token."""
    if prompt_len > max_model_len:
        # vLLM counts only up to the first excess token, and its message says so.
        least = max_model_len + 1
        raise refused(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"at least {least} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            least,
        )
    if prompt_len == max_model_len:
        raise refused(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{prompt_len} input tokens, which leaves no room for an output token: it may have "
            f"{max_model_len - 1}. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_len,
        )
    if prompt_len < 1:
        raise ApiError(400, "The prompt is empty: it has no token.", param="prompt")


def logprobs_limit(max_logprobs: int, vocab_size: int) -> int:
    """Maximum logprobs per token, from --max-logprobs."""
    return vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)


def resolve_logprobs(value: int, most: int, vocab_size: int, field: str = "logprobs") -> int:
    """The number of alternatives per token; -1 asks for the whole vocabulary. Raises ApiError for more than
    ``most``."""
    if value < -1:
        raise refused(f"`{field}` must be a positive value or -1.", field, value)
    wanted = vocab_size if value == -1 else value
    if wanted > most:
        raise refused(
            f"Requested sample logprobs of {_shown_logprobs(value, vocab_size)}, which is greater than max "
            f"allowed: {most}",
            field,
            value,
        )
    return wanted


def resolve_prompt_logprobs(value: int, most: int, vocab_size: int, *, stream: bool) -> int:
    """The number of alternatives per prompt token that ``value`` of ``prompt_logprobs`` asks for."""
    if stream:
        raise refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if value < -1:
        raise refused("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", value)
    wanted = vocab_size if value == -1 else value
    if wanted > most:
        raise refused(
            f"Requested prompt logprobs of {_shown_logprobs(value, vocab_size)}, which is greater than max "
            f"allowed: {most}",
            "prompt_logprobs",
            value,
        )
    return wanted


def _shown_logprobs(value: int, vocab_size: int) -> str:
    return f"the whole vocabulary ({vocab_size})" if value == -1 else shown(value)


def wide_logprob_bytes(alternatives: int, max_tokens: int, streams: int, *, stream: bool) -> int:
    """Bytes that the logprobs of a request's tokens may take, if they are more per token than an entry of a
    frame holds; otherwise 0. Raises ApiError if one request may not ask for as many."""
    width = 1 + alternatives
    if width <= ENTRY_CANDIDATES:
        return 0
    if stream and width > MAX_STREAMED_CANDIDATES:
        raise ApiError(
            400,
            f"logprobs: {alternatives} per token are too many for events, which have at most "
            f"{MAX_STREAMED_CANDIDATES - 1}; there is no such limit without stream.",
            param="logprobs",
        )
    return _logprob_bytes("logprobs", alternatives, max_tokens * streams, "(max_tokens, n)")


def wide_prompt_logprob_bytes(alternatives: int, prompt_tokens: int) -> int:
    """Bytes that the logprobs of a request's prompt tokens take if each token has very many; otherwise 0."""
    if 1 + alternatives <= ENTRY_CANDIDATES:
        return 0
    return _logprob_bytes("prompt_logprobs", alternatives, prompt_tokens, "in the prompt")


def _logprob_bytes(field: str, alternatives: int, tokens: int, which: str) -> int:
    candidates, most = (1 + alternatives) * tokens, MAX_LOGPROB_BYTES // CANDIDATE_BYTES
    if candidates > most:
        raise ApiError(
            400,
            f"{field}: {alternatives} for each of {tokens} tokens are {candidates} values, at most {most} "
            f"are allowed in one request: ask for fewer logprobs, or for fewer tokens {which}.",
            param=field,
        )
    return candidates * CANDIDATE_BYTES


def check_streamed_echo(prompt_len: int, alternatives: int) -> None:
    """Raises ApiError unless a stream can echo a prompt of ``prompt_len`` tokens with logprobs."""
    most = MAX_STREAMED_CANDIDATES // (1 + alternatives)
    if prompt_len > most:
        raise ApiError(
            400,
            f"echo with logprobs={alternatives} and stream: the prompt has {prompt_len} tokens, at most "
            f"{most} are allowed; there is no such limit without stream.",
            param="echo",
        )


def check_routed_experts(*, stream: bool, stop: Sequence[str]) -> None:
    """Raises ApiError unless a request may ask for the experts of its tokens: engines send them at the end,
    which a stop string does not let them see."""
    for field, is_set in (("stream", stream), ("stop", bool(stop))):
        if is_set:
            raise ApiError(
                400,
                f"return_routed_experts is not available with `{field}`.",
                param="return_routed_experts",
            )


def check_best_of(best_of: int, n: int, *, stream: bool) -> None:
    """Raises ApiError unless ``best_of`` choices can be generated and ``n`` of them sent."""
    if not n <= best_of <= MAX_CHOICES:
        raise refused(f"best_of must be at least n={n} and at most {MAX_CHOICES}.", "best_of", best_of)
    if stream and best_of > n:
        raise refused("best_of must equal n when `stream=True`.", "best_of", best_of)


def stop_strings(stop: str | list[str] | None, field: str = "stop") -> tuple[str, ...]:
    """The stop strings in the ``field`` of a request. Raises ApiError for one that is empty or too long."""
    if not stop:
        if stop == "":
            raise ApiError(400, f"{field} cannot contain an empty string.", param=field)
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
    if "" in strings:
        raise ApiError(400, f"{field} cannot contain an empty string.", param=field)
    longest = max(map(len, strings))
    if longest > MAX_STOP_CHARACTERS:
        raise ApiError(
            400,
            f"{field} has a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed.",
            param=field,
        )
    return strings


def _token_ids(field: str, ids: Collection[int], vocab_size: int) -> tuple[int, ...]:
    unique = tuple(dict.fromkeys(ids))
    for id in unique:
        if not 0 <= id < vocab_size:
            raise ApiError(
                400,
                f"{field} has the token id {shown(id)}, which is not in [0, {vocab_size - 1}]: "
                f"the vocabulary has {vocab_size} tokens.",
                param=field,
            )
    return unique


def _listed_logprobs(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_LISTED_LOGPROBS:
        raise refused(
            f"logprob_token_ids has {len(ids)} token ids, at most {MAX_LISTED_LOGPROBS} are allowed.",
            "logprob_token_ids",
            len(ids),
        )
    return _token_ids("logprob_token_ids", ids, vocab_size)


def _allowed(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise ApiError(400, "allowed_token_ids must not be empty.", param="allowed_token_ids")
    return _token_ids("allowed_token_ids", ids, vocab_size)


def _logit_bias(bias: dict[int, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    _token_ids("logit_bias", bias.keys(), vocab_size)
    for id, value in bias.items():
        if value != value:
            raise refused(f"logit_bias.{id} must be a number, got nan.", "logit_bias", value)
    return {id: max(-MAX_BIAS, min(MAX_BIAS, value)) for id, value in bias.items()}


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of ``words``, at the start of a text and after a space if they differ."""
    if len(words) > MAX_BAD_WORDS:
        raise ApiError(
            400, f"bad_words has {len(words)} texts, at most {MAX_BAD_WORDS} are allowed.", param="bad_words"
        )
    characters = sum(map(len, words))
    if characters > MAX_BAD_WORDS_CHARACTERS:
        raise ApiError(
            400,
            f"bad_words has {characters} characters, at most {MAX_BAD_WORDS_CHARACTERS} are allowed.",
            param="bad_words",
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word:
            raise ApiError(400, "bad_words cannot contain an empty string.", param="bad_words")
        inner = word.lstrip()
        for text in (word, f" {inner}") if inner else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                sequences[ids] = None
    return tuple(sequences)
