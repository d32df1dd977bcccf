"""A request body to a plan: what to tokenize, how to sample, what to send back."""

from collections.abc import Sequence

import msgspec

from penstock.api.chat_template import ChatTemplate
from penstock.api.tokenizer import Tokenizer
from penstock.config.options import ServeConfig
from penstock.wire.messages import Sampling


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are checked against; of the model and the engines that serve it."""

    names: tuple[str, ...]
    """Names a request may use; the first is the one replies report."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    """Defaults of fields that a request leaves out, from generation_config.json."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


class RequestPlan(msgspec.Struct, gc=False):
    """One validated request."""

    chat: bool
    model: str
    """The name replies carry."""
    prompts: Sequence[str | list[int]]
    """Texts to tokenize or token ids; never empty."""
    add_special_tokens: bool = True
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    logprobs: int = -1
    """Alternatives per token; -1: no logprobs, 0: the sampled token's only."""
    max_tokens: int | None = None
    """None: what the context leaves."""
    interval: int | None = None
    """Tokens per event; None: the server's."""
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    """Keep at most this many prompt tokens; see :meth:`truncate`."""

    def sampling(self, prompt_len: int, index: int = 0) -> Sampling:
        """Sampling of choice ``index`` (0 to n-1) of a prompt with ``prompt_len`` tokens.

        Raises ApiError when the prompt, or it with max_tokens, does not fit the context.
        """
        raise NotImplementedError

    def truncate(self, prompt: bytes) -> bytes:
        """The int32 token bytes that remain when truncate_prompt_tokens is applied."""
        raise NotImplementedError


class TokenizePlan(msgspec.Struct, gc=False):
    """A request to /tokenize: the text, and how to encode it."""

    text: str
    add_special_tokens: bool
    return_token_strs: bool


class Planner:
    """Plans requests for one served model."""

    def __init__(
        self, config: ServeConfig, info: ModelFacts, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        raise NotImplementedError

    def completion(self, body: bytes, request_id: str | None = None) -> RequestPlan:
        """Plan of a body of /v1/completions. Raises ApiError."""
        raise NotImplementedError

    def chat(self, body: bytes, request_id: str | None = None) -> RequestPlan:
        """Plan of a body of /v1/chat/completions. Raises ApiError."""
        raise NotImplementedError

    def tokenize(self, body: bytes) -> TokenizePlan:
        """Plan of a body of /tokenize. Raises ApiError."""
        raise NotImplementedError

    def detokenize(self, body: bytes) -> list[int]:
        """Token ids of a body of /detokenize. Raises ApiError."""
        raise NotImplementedError
