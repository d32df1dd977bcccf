"""What the server has made of a request: what to tokenize, how to sample, what to send back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.generation import sampling_params
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.stream_interval import EVERY_TOKEN, StreamInterval
from penstock.generation.structured_output import Constraint
from penstock.wire.messages import KVTransferParams, SamplingParams

ASSISTANT = "assistant"


class RequestPlan(msgspec.Struct, gc=False):
    """One validated request. Strings of the client's (model apart) are to be escaped in replies."""

    model: str
    """The name replies carry."""
    prompts: Sequence[str | list[int]]
    """Texts to tokenize or token ids; never empty."""
    add_special_tokens: bool
    base: SamplingParams
    """SamplingParams of choice 0 with all of max_tokens; see :meth:`sampling`."""
    max_model_len: int
    n: int = 1
    """Choices to generate per prompt."""
    kept: int | None = None
    """The likeliest of them that are sent; None: all."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """Whether a completion starts with its prompt's text."""
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    logprobs: int = -1
    """Alternatives per token; -1: no logprobs, 0: the sampled token's only."""
    prompt_logprobs: int = -1
    """The same per token of the prompt."""
    max_tokens: int | None = None
    """As requested; None: what the context leaves. 0 (with echo): one token is generated, and not shown."""
    interval: StreamInterval = EVERY_TOKEN
    """When the engine sends what it has generated."""
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    """What the model is to run with; None: as it is."""
    kv_transfer_params: KVTransferParams | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    """Most prompt tokens to keep; None: all."""
    truncate_left: bool = True
    """Whether truncation drops tokens at the start."""
    constraint: Constraint | None = None
    """Where the grammar in ``base`` comes from; it is yet to be validated."""
    role: str = ASSISTANT
    """Role of a chat's reply."""
    echo_text: str = ""
    """What the text of every choice of a chat starts with: the message it continues, if echo asks for it."""
    format: MessageFormat | None = None
    """Where a choice's text may have tool calls and reasoning; None: it is all content."""

    def sampling(self, prompt_len: int, index: int = 0) -> SamplingParams:
        """SamplingParams of choice ``index`` (0 to n-1) of a prompt with ``prompt_len`` tokens.

        max_tokens is held to what the context leaves. Raises ApiError when that is nothing.
        """
        base = self.base
        room = self.max_model_len - prompt_len
        if room < 1 or prompt_len < 1:
            sampling_params.check_prompt_len(prompt_len, self.max_model_len)
        if room >= base.max_tokens:
            if index == 0:
                return base
            room = base.max_tokens
        elif base.min_tokens > room:
            sampling_params.check_min_tokens(base.min_tokens, room)
        seed = base.seed + index & sampling_params.SEED_MASK
        # One choice is enough to learn of the prompt; a streamed one must know before its own first event.
        scores = base.prompt_logprobs if index == 0 or self.stream else -1
        return msgspec.structs.replace(base, max_tokens=room, seed=seed, prompt_logprobs=scores)

    def truncate(self, prompt: bytes) -> bytes:
        """What truncate_prompt_tokens keeps of a prompt of int32 token bytes."""
        most = self.truncate_prompt_tokens
        if most is None or len(prompt) <= 4 * most:
            return prompt
        return prompt[-4 * most :] if self.truncate_left else prompt[: 4 * most]


def constrain(plan: RequestPlan, constraint: Constraint) -> None:
    """Hold the plan's outputs to a grammar."""
    plan.constraint = constraint
    plan.base = msgspec.structs.replace(plan.base, grammar=constraint.grammar)
