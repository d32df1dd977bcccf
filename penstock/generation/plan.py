"""The plan of a checked request: what to tokenize, how to sample, what to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.generation.media.source import ImageSource
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.replies.stream_interval import EVERY_TOKEN, StreamInterval
from penstock.generation.request import validation
from penstock.generation.request.structured_output import Constraint
from penstock.wire.messages import MAX_NAME_CHARS, AdapterKey, CacheHints, KVTransferParams, SamplingParams

ASSISTANT = "assistant"


class RequestPlan(msgspec.Struct, gc=False):
    """One validated request. Replies must escape its strings, except ``model``."""

    model: str
    """The model name that replies report."""
    prompts: Sequence[str | bytes]
    """Texts, or token ids as int32 little-endian; at least one until they are tokenized."""
    add_special_tokens: bool
    base: SamplingParams
    """Parameters of choice 0 with the requested max_tokens; see :meth:`sampling`."""
    max_model_len: int
    """Maximum length of prompt plus output in tokens. Without max_tokens the KV cache may limit it, too."""
    n: int = 1
    """Number of choices to generate per prompt."""
    kept: int | None = None
    """With best_of: how many of the choices, the likeliest, are sent; None: all."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """Whether a completion's text starts with its prompt."""
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_weight_versions: bool = False
    logprobs: int = -1
    """Number of alternatives per token; -1: no logprobs, 0: only the sampled token."""
    prompt_logprobs: int = -1
    """Number of alternatives per prompt token; -1: no logprobs of the prompt."""
    tokens_as_ids: bool = False
    """Whether logprobs spell tokens as ``token_id:5``."""
    logprob_bytes: int = 0
    """Memory that the logprobs may take, if they are very many per token."""
    max_tokens: int | None = None
    """As requested; None: limited by the context. 0 (with echo): one token is generated but not sent."""
    interval: StreamInterval = EVERY_TOKEN
    """How often the engine sends tokens."""
    priority: int = 0
    cache_salt: str | None = None
    session: str | None = None
    """Requests with the same one run on the same engine if it has room; the header X-Session-ID takes
    precedence."""
    keep_s: int = 0
    """Seconds for which its KV blocks are wanted after their last use; 0: not said."""
    kv_hints: bytes | None = None
    """For vLLM's engines, JSON."""
    adapter: AdapterKey | None = None
    """The LoRA adapter; None: the base model."""
    kv_transfer_params: KVTransferParams | None = None
    request_id: str | None = None
    prefix: bytes = b""
    """Token ids before the text of the only prompt, as int32 little-endian."""
    truncate_prompt_tokens: int | None = None
    """Maximum prompt tokens to keep; None: all."""
    truncate_left: bool = True
    """Whether truncation drops tokens at the start of the prompt."""
    constraint: Constraint | None = None
    """The grammar in ``base`` and its field; the caller validates it."""
    role: str = ASSISTANT
    """Role of a chat's reply."""
    echo_text: str = ""
    """Chat with echo: the text of the continued message, which starts every choice."""
    warning: str | None = None
    """Text of the reply's ``Warning`` header, without quotes and backslashes."""
    dialect_fields: Any = None
    """Fields of the request that its dialect needs again for the reply."""
    columns: bool = False
    """Whether the reply is columns of token ids and logprobs, not the API's own."""
    images: Sequence[ImageSource] = ()
    """The pictures that the only prompt shows, in its order; emptied when they are prepared."""
    image_parts: Sequence[memoryview] = ()
    """Their base64, where that was taken out of the body (:mod:`penstock.generation.media.lifting`)."""
    pictures: Any = None
    """The prepared ones: :class:`penstock.generation.media.preparation.Pictures`."""
    turn: NextTurn | None = None
    """What the only prompt has in common with that of the turn before."""
    format: MessageFormat | None = None
    """How to parse tool calls and reasoning; None: all text is content."""
    compaction: Any = None
    """A PlannedCompaction of :mod:`penstock.generation.compaction.planned`: for a long prompt."""
    answer: bytes | None = None
    """The whole reply, as JSON, to a request for which nothing is generated."""

    def cache_hints(self, session: str | None) -> CacheHints | None:
        """What engines are told of the requests that follow. ``session``: of this one."""
        if session is not None and len(session) > MAX_NAME_CHARS:
            session = None
        if session is None and not self.keep_s and self.kv_hints is None:
            return None
        return CacheHints(self.keep_s, session, self.kv_hints)

    def sampling(self, prompt_len: int, index: int = 0) -> SamplingParams:
        """Parameters of choice ``index`` (0 to n-1) of a prompt with ``prompt_len`` tokens.

        max_tokens is reduced to what the context leaves. Raises ApiError if it leaves no token.
        """
        base = self.base
        room = self.max_model_len - prompt_len
        if room < 1 or prompt_len < 1:
            validation.check_prompt_len(prompt_len, self.max_model_len)
        if room >= base.max_tokens:
            if index == 0:
                return base
            room = base.max_tokens
        elif base.min_tokens > room:
            validation.check_min_tokens(base.min_tokens, room)
        seed = base.seed + index & validation.SEED_MASK
        # One choice gets the prompt's logprobs for all; streamed choices need them before their first event.
        scores = base.prompt_logprobs if index == 0 or self.stream else -1
        return msgspec.structs.replace(base, max_tokens=room, seed=seed, prompt_logprobs=scores)

    def truncate(self, prompt: bytes) -> bytes:
        """``prompt``, int32 token bytes, cut to truncate_prompt_tokens."""
        most = self.truncate_prompt_tokens
        if most is None or len(prompt) <= 4 * most:
            return prompt
        return prompt[-4 * most :] if self.truncate_left else prompt[: 4 * most]


def answer_at_once(body: bytes) -> RequestPlan:
    """The plan of a request for which nothing is generated; ``body``: the reply's, as JSON."""
    base = SamplingParams(max_tokens=1, seed=0)
    return RequestPlan(
        model="", prompts=(), add_special_tokens=False, base=base, max_model_len=1, answer=body
    )


def constrain(plan: RequestPlan, constraint: Constraint | None) -> None:
    """Make the plan's outputs match a grammar; None: let them be free."""
    plan.constraint = constraint
    grammar = None if constraint is None else constraint.whole
    plan.base = msgspec.structs.replace(plan.base, grammar=grammar)
