"""Messages between API servers and engines: what crosses the ZMQ socket, and how it is encoded.

==================  ==========  ==========  ==============================================================
message             sender      receiver    answer
==================  ==========  ==========  ==============================================================
Hello               API server  engine      Welcome
Submit              API server  engine      FrameHeader with the stream's rows, the last one with a finish
                                            reason; or StreamFailed; or GoAway
Abort               API server  engine      FrameHeader with the streams' last rows
Disconnect          API server  engine      none
RpcCall             API server  engine      RpcReply
EngineMetricsQuery  API server  engine      EngineMetrics
ApplyStates         API server  engine      StatesObserved, again when the engine has observed more
PagePiece           API server  engine      none
Welcome             engine      API server  none
FrameHeader         engine      API server  none; columns follow, see :mod:`penstock.wire.frames`
StreamFailed        engine      API server  none
RpcReply            engine      API server  none
RoutedExperts       engine      API server  none; the stream's last row follows
EngineMetrics       engine      API server  none
StatesObserved      engine      API server  none
PagesWanted         engine      API server  PagePiece, until they are complete
Started             engine      API server  none
Admitted            engine      API server  none; the stream's first row follows
Draining            engine      API server  none
GoAway              engine      API server  none; the engine exits
==================  ==========  ==========  ==============================================================

Typed, array-like msgpack. Field order is the wire format: append fields, never insert or reuse one. A ZMQ
message is a list of parts. An API server sends one or more messages, one per part. An engine sends either
one message, or a token frame: a FrameHeader part and a part of raw columns.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.media.items import Media, MediaInfo, PagePiece, PagesWanted
from penstock.wire.pooling import PoolingInfo, PoolingParams

ENGINE_PROTOCOL_VERSION = 9

Handle: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""An API server's number for one stream, repeated in every row; int32 on the wire."""
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
MAX_SUBMIT_CHOICES = 1 << 13
"""More than a request may have."""
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

KVTransferParams: TypeAlias = bytes
"""A JSON object by which KV cache connectors describe one request to each other, also through clients."""
Incarnation: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""The supervisor run that a process belongs to, see :func:`penstock.wire.sockets.new_incarnation`."""

RequestId: TypeAlias = Annotated[str, Meta(max_length=1024)]
"""An id by which clients know a request: longer than one that they may give to it."""
AdapterKey: TypeAlias = tuple[str, str]
"""Name and digest of a LoRA adapter."""

OVERLOADED = "overloaded"
"""StreamFailed.code of a stream that was rejected or dropped from the queue, because the queue is full."""
UNAVAILABLE = "unavailable"
"""StreamFailed.code of a stream that its engine cannot run at present; another one may."""
SLEEPING = "sleeping"
"""StreamFailed.code of a stream that was ended or rejected because its engine sleeps."""
PAUSED = "paused"
"""StreamFailed.code of a stream that was rejected because its engine is paused."""
SLEEP = "sleep"
"""Name of the desired state that says whether engines sleep."""
PAUSE = "pause"
"""Name of the desired state that says whether engines compute streams."""
WEIGHTS = "weights"
"""Name of the desired state that says which weights engines compute with."""
NO_ADAPTER = "model_not_found"
"""StreamFailed.code of a stream whose LoRA adapter the engine does not have."""
MEDIA_GONE = "media_gone"
"""StreamFailed.code of a stream whose pictures' pages neither the engine nor the API server has."""
PROMPT_GONE = "prompt_gone"
"""StreamFailed.code of a stream whose Submit.prefix is of a prompt that the engine does not keep: it is to be
sent again, whole."""
CONFLICT = "conflict"
"""RpcReply.code of a call whose key was used for something else."""
MAX_IDEMPOTENCY_KEY_LENGTH = 255
"""Maximum characters of RpcCall.key."""
MAX_SERVERS = 1024
"""API servers of one engine: the bound of ``--api-server-count``."""
MAX_TOKEN_LIST = 1 << 20
"""Entries of stop_token_ids, allowed_token_ids, bad_words and logit_bias, and logprobs of a token: more than
any vocabulary has."""
MAX_LISTED_LOGPROBS = 1024
"""Entries of logprob_token_ids: those that an entry of a frame may have beside the token's own."""
MAX_ROUTED_BYTES = 64 << 20
"""Bytes of RoutedExperts.data: 128,000 tokens of 64 layers with 8 experts each."""
MAX_ABORTED = 1 << 16
"""Streams that one Abort stops."""
MAX_TRACE_CHARS = 600
"""Characters of a trace context."""
MAX_NAME_CHARS = 1024
"""Characters of the names in messages: a cache salt, an adapter, a method."""
MAX_KEEP_S = 24 * 3600
"""OpenAI's longest retention."""
MAX_DIGEST_CHARS = 64
"""Characters of Adapter.digest."""
MAX_PATH_CHARS = 4096
"""Characters of Adapter.path, which are those of a path in Linux."""
MAX_CALL_BYTES = 1 << 20
"""Length of an RpcCall or RpcReply."""


class WireError(ValueError):
    """Bytes of a peer that are not a valid message."""


class InvalidSubmit(WireError):
    """A Submit whose handles can be read, with a field that is out of bounds: its streams fail, and the
    peer's others go on."""

    def __init__(self, message: str, streams: list[tuple[int, int]]) -> None:
        """``streams``: handle and generated tokens of each."""
        super().__init__(message)
        self.streams = streams


TokenSequence: TypeAlias = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=32)]
"""A mark of reasoning."""


class ThinkingLimit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How many tokens of reasoning a stream may have, and the marks around reasoning. Streams of one request
    share the object."""

    budget: Count
    """Tokens between a start and an end, of all reasoning of the output together. Those that follow an open
    start in the prompt count, too."""
    starts: Annotated[tuple[TokenSequence, ...], Meta(min_length=1, max_length=8)]
    """What opens reasoning."""
    ends: Annotated[tuple[TokenSequence, ...], Meta(min_length=1, max_length=16)]
    """What ends it."""
    forced: TokenSequence
    """What follows when the budget is used up."""
    again: TokenSequence
    """The same, where the output has reopened reasoning after that."""
    opened: bool | None = None
    """Whether the output begins in reasoning; None: if the prompt has a start after its last end."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How one stream is sampled and when it ends. The API server validates the values; the bounds here are
    those of what an engine can hold.

    The token at position p of a stream is a function of the logits and (seed, p) alone.
    """

    max_tokens: Count
    seed: Seed
    temperature: Annotated[float, Meta(ge=0, le=1e30)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    """0 or -1: no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKEN_LIST)] = ()
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_LIST)] = -1
    """Alternatives per generated token; 0: only the sampled token's logprob, -1: no logprobs."""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_LIST)] = -1
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    bad_words: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKEN_LIST)], ...],
        Meta(max_length=MAX_TOKEN_LIST),
    ] = ()
    grammar: str | None = None
    """A grammar that the output must match, in llguidance's format: JSON or Lark."""
    seeded: bool = False
    """Whether the request set the seed; otherwise it is arbitrary."""
    logprob_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LISTED_LOGPROBS)] = ()
    """Tokens whose logprobs take the place of the likeliest ones', in this order; ``logprobs`` is their
    number."""
    routed_experts: bool = False
    """Whether RoutedExperts comes with the stream's end."""
    thinking: ThinkingLimit | None = None
    """None: reasoning is not limited."""


# -- API server → engine

Build: TypeAlias = Annotated[str, Meta(max_length=128)]


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """First message of an API server on a connection. ``epoch`` counts the API server's restarts."""

    protocol: Count
    server: Annotated[int, Meta(ge=0, lt=MAX_SERVERS)]
    epoch: Count
    incarnation: Incarnation = 0
    connection: Count = 0
    """Number of this connection among those from this API server to this engine."""
    build: Build = ""
    """The release of an API server of a fleet of several hosts."""


class SubmitChoice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A further stream of a Submit, and the fields in which it differs from the first one."""

    stream: Handle
    seed: Seed
    max_tokens: Count
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_LIST)] = -1
    prompt: bytes | None = None
    """Token ids, int32 little-endian; None: the first stream's prompt without its ``resumed`` tokens."""
    output: bytes = b""
    """Token ids to append to the prompt: what another engine has generated of this stream."""


class KeptPrefix(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The beginning of a prompt, which the engine has of an earlier one on the same connection."""

    number: Annotated[int, Meta(ge=1, lt=1 << 31)]
    """Submit.keep of that prompt."""
    tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    """How many of its tokens come before those in Submit.prompt."""
    replaced: bool = False
    """Whether the engine keeps that prompt no longer."""


class CacheHints(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a client says of the KV blocks of its requests to come."""

    keep_s: Annotated[int, Meta(ge=0, le=MAX_KEEP_S)] = 0
    """Seconds for which the blocks of prompt and output are wanted after their last use; 0: not said."""
    session: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """For vLLM's engines: the session_id of the request."""
    kv_hints: KVTransferParams | None = None
    """For vLLM's engines: kv_hints of the request, JSON."""


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Start a stream, and ``choices`` others of the same request. Each ends exactly once: by a row with a
    finish reason, StreamFailed, or GoAway."""

    stream: Handle
    prompt: bytes
    """Token ids, int32 little-endian; with a ``prefix`` those after it."""
    sampling: SamplingParams
    interval: Annotated[int, Meta(ge=1, lt=1 << 15)] = 1
    """Tokens per row; the first token and the last ones are sent immediately."""
    priority: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    cache_salt: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    resumed: Count = 0
    """Tokens at the prompt's end that are output of this stream, generated by another engine."""
    interval_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Minimum milliseconds between rows, except the first and the last."""
    adapter: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """Name of a LoRA adapter; None: the base model."""
    kv_transfer_params: KVTransferParams | None = None
    choices: Annotated[tuple[SubmitChoice, ...], Meta(max_length=MAX_SUBMIT_CHOICES)] = ()
    """Further streams, which share all other fields: see :mod:`penstock.wire.submits`."""
    resubmitted: bool = False
    """Another engine had accepted the stream, and is lost. It comes before new streams, the queue's limits on
    requests and tokens do not apply to it, and Started tells when it begins."""
    trace: Annotated[str, Meta(max_length=MAX_TRACE_CHARS)] = ""
    """Context of the request's span (:attr:`penstock.telemetry.trace_context.TraceContext.sent`); empty: the
    stream has no span."""
    adapter_digest: Annotated[str, Meta(max_length=MAX_DIGEST_CHARS)] = ""
    """Adapter.digest of ``adapter``: another adapter may take its name while the stream runs."""
    ids: Annotated[tuple[RequestId, ...], Meta(max_length=4)] = ()
    """By which clients know the request: X-Request-Id, and the reply's id."""
    prefix: KeptPrefix | None = None
    """What comes before ``prompt``; None: nothing."""
    keep: Count = 0
    """Number by which later Submits on the connection refer to the whole prompt; 0: none will. Never used
    again."""
    hints: CacheHints | None = None
    """None: the client has said nothing."""
    pooling: PoolingParams | None = None
    """What is made of inputs, whose token ids follow each other in ``prompt``; ``sampling.max_tokens`` is the
    number of the stream's inputs, of which ``resumed`` have been answered and are not in the prompt. None:
    the prompt is continued."""
    media: Media = ()
    """The pictures in the prompt."""

    @property
    def adapter_key(self) -> AdapterKey | None:
        """The adapter that the stream runs with; None: the base model."""
        return None if self.adapter is None else (self.adapter, self.adapter_digest)


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Stop streams. Each still gets a last row, with FinishReason.ABORT, unless it had already ended."""

    streams: Annotated[list[Handle], Meta(max_length=MAX_ABORTED)]
    stopped: bool = False
    """Whether the tokens are complete, as their text contains a stop string; metrics count them so."""


class Disconnect(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """The API server disconnects; the engine drops its streams."""


class EngineMetricsQuery(msgspec.Struct, array_like=True, frozen=True, tag=6, gc=False):
    """The API server wants the engine's metrics: EngineMetrics after the step that follows, or at once from
    an idle engine. They include the end of every stream whose end or abort was sent before."""

    number: Annotated[int, Meta(ge=1, lt=1 << 31)]


class RpcCall(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Run a named operation once, between steps."""

    call: Count
    method: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    arguments: dict[str, Any] = {}
    key: Annotated[str, Meta(max_length=MAX_IDEMPOTENCY_KEY_LENGTH)] = ""
    """Idempotency key: another call with it gets the first one's reply. Empty: every call runs."""


class DesiredState(msgspec.Struct, array_like=True, frozen=True):
    """A state that all engines and API servers shall have, such as sleep or the list of adapters."""

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    generation: Count
    """Greater with each value that is set, also for a value that was set before."""
    value: dict[str, Any]
    """Empty: the state's default."""
    rollback: bool = False
    """Whether this takes the place of a value that could not be applied."""
    settled: bool = False
    """Everybody who was there has observed it."""

    @property
    def is_firm(self) -> bool:
        """Whether it holds: a member applies it as far as it can. Another one is given up when a member
        cannot apply it."""
        return self.rollback or self.settled


class ApplyStates(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Apply these states, except those of which the engine knows a later generation."""

    states: list[DesiredState]


class ObservedState(msgspec.Struct, array_like=True, frozen=True):
    """The latest generation of a state that the engine has applied, or could not apply."""

    name: str
    generation: Count
    error: str | None = None
    """Why it could not be applied."""
    result: dict[str, bool | int | str | dict[str, str] | None] = {}
    """What the engine has of the state."""
    step: Count = 0
    """Steps that the engine had published then."""


# -- engine → API server


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that requests may name as their model."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]
    """Absolute path of its directory, the same on every host."""
    parent: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """Name of its base model, as its files or its user tell; None: the served model."""
    digest: Annotated[str, Meta(max_length=MAX_DIGEST_CHARS)] = ""
    """Digest of its files: an adapter with other files is another one, also with this name."""
    rank: Count = 0
    """Largest rank of its layers."""

    @property
    def key(self) -> AdapterKey:
        return self.name, self.digest


class LoraInfo(msgspec.Struct, array_like=True, frozen=True):
    """What LoRA adapters an engine can load."""

    max_loras: Count
    """Adapters that can run in one step."""
    max_lora_rank: Count
    max_cpu_loras: Count
    """Adapters that can be loaded."""
    modules: dict[str, tuple[Count, Count]] = {}
    """Output and input features of each layer that adapters may change, by its path in the model, such as
    ``model.layers.0.self_attn.q_proj``; empty: only the engine can tell."""


CACHE_CONFIG_LABELS = (
    "block_size",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks",
)
"""Names, which are vLLM's, of the properties of a KV cache."""


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """Limits and properties of an engine; equal on every rank."""

    engine: str
    max_model_len: Count
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    """API servers hold a table of this length."""
    max_num_seqs: Count
    eos_token_ids: tuple[TokenId, ...] = ()
    device: str = "cpu"
    dtype: str = ""
    kv_cache_tokens: Count = 0
    """Capacity of the KV cache in tokens; 0 when the engine has none."""
    transfers_kv: bool = False
    """Whether it supports Submit.kv_transfer_params."""
    cache_config: dict[str, str] = {}
    """Properties of the KV cache that metrics show (:data:`CACHE_CONFIG_LABELS`); empty without one."""
    lora: LoraInfo | None = None
    """None: it runs no adapters."""
    pooling: PoolingInfo | None = None
    """None: it makes text alone."""
    media: MediaInfo | None = None
    """None: it takes no pictures."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=16):
    """The engine accepts the connection. ``epoch`` counts the engine's restarts."""

    protocol: int
    rank: Count
    epoch: Count
    info: EngineInfo
    incarnation: Incarnation = 0
    kept_prompt_bytes: Count = 0
    """How much of prompts the engine keeps for all API servers together (Submit.keep)."""


class FrameHeader(msgspec.Struct, array_like=True, frozen=True, tag=17, gc=False):
    """Header of a token frame: the columns that follow, and the engine's load after that step."""

    step: Annotated[int, Meta(ge=0)]
    columns: list[Count]
    """Flat (column id, element count) pairs, in the order of the raw bytes."""
    waiting: Count = 0
    running: Count = 0
    kv_used: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the KV cache in use."""
    accepted: Count = 0
    """Submits taken from this connection so far; the load does not include later ones."""
    kv_transfer_params: dict[Handle, KVTransferParams] | None = None
    """Parameters by stream, for streams that end in this frame."""
    weights: Count = 0
    """Generation of the state :data:`WEIGHTS` with which all tokens of the frame were computed; 0: of none.
    StatesObserved with that generation came before."""


class StreamFailed(msgspec.Struct, array_like=True, frozen=True, tag=18, gc=False):
    """A stream ended with an error. All its tokens were sent before."""

    stream: Handle
    position: Count
    """Tokens generated."""
    code: str
    """invalid_request, engine_error, OVERLOADED, UNAVAILABLE, SLEEPING, PAUSED, NO_ADAPTER, MEDIA_GONE or
    PROMPT_GONE."""
    message: str
    retry_after_ms: Count = 0
    """With OVERLOADED: estimated time until the queue has room."""


class Started(msgspec.Struct, array_like=True, frozen=True, tag=23, gc=False):
    """A resubmitted stream has left the queue. Sent before the step that computes it: if the engine ends in
    that step, the stream may be the cause, and those that wait are not."""

    stream: Handle


class Admitted(msgspec.Struct, array_like=True, frozen=True, tag=26, gc=False):
    """A stream has been given a slot. Sent before its first row, by engines of servers that tell each request
    its times (``--enable-per-request-metrics``)."""

    stream: Handle
    queued: float
    """Seconds from its arrival to the step that computes it."""
    ran: float
    """Seconds since that step began."""


class RpcReply(msgspec.Struct, array_like=True, frozen=True, tag=19):
    """Result or error of one RpcCall."""

    call: Count
    error: str | None = None
    result: Any = None
    step: Annotated[int, Meta(ge=0)] = 0
    """Token frames that the engine had published when the call ran."""
    repeated: bool = False
    """The call ran earlier, with the same key. For PREPARE: the change was made earlier."""
    code: str = ""
    """CONFLICT, or empty for other errors."""


class GoAway(msgspec.Struct, array_like=True, frozen=True, tag=20, gc=False):
    """The engine exits cleanly; nothing follows. It has sent all tokens of its unfinished streams, which an
    API server may resume on another engine."""

    reason: str


class Draining(msgspec.Struct, array_like=True, frozen=True, tag=22, gc=False):
    """The engine finishes its streams, accepts no new ones, and then sends GoAway."""


class EngineMetrics(msgspec.Struct, array_like=True, frozen=True, tag=21, gc=False):
    """Metrics since the engine's start, and its load. Sent once a second while they change."""

    snapshot: bytes
    """An encoded :class:`penstock.metrics.snapshot.Snapshot`."""
    waiting: Count = 0
    running: Count = 0
    kv_used: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the KV cache in use."""
    deferred: Count = 0
    """Streams among the waiting ones that could not begin even if there were room."""
    query: Count = 0
    """Number of the EngineMetricsQuery that this answers; 0: none."""


class StatesObserved(msgspec.Struct, array_like=True, frozen=True, tag=24):
    """What the engine has observed of every state that was ever desired of it."""

    states: list[ObservedState]


FromServer: TypeAlias = (
    Hello | Submit | Abort | Disconnect | RpcCall | EngineMetricsQuery | ApplyStates | PagePiece
)


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True, tag=25, gc=False):
    """The experts that computed a stream's tokens, prompt and output, from the first one on. Before the row
    with which it ends; failed streams have none."""

    stream: Handle
    layers: Annotated[int, Meta(ge=1, le=1 << 12)]
    """Layers with experts, in the model's order."""
    per_token: Annotated[int, Meta(ge=1, le=1 << 12)]
    width: Annotated[int, Meta(ge=1, le=2)]
    """Bytes of a number."""
    data: Annotated[bytes, Meta(max_length=MAX_ROUTED_BYTES)]
    """Unsigned little-endian numbers [tokens, layers, per_token]."""


FromEngine: TypeAlias = (
    Welcome | FrameHeader | StreamFailed | Started | Admitted | RpcReply | GoAway | EngineMetrics | Draining
) | (StatesObserved | RoutedExperts | PagesWanted)

encode = msgspec.msgpack.Encoder().encode
