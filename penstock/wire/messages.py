"""Control messages between API servers and engines: typed, array-like msgpack, append-only fields.

A ZMQ message is a list of parts. An API server sends one or more control messages, one per part. An
engine sends either one control message, or a token frame: a :class:`FrameHeader` part and a part of raw
columns (see :mod:`penstock.wire.frames`). Field order is the wire format: append, never insert or reuse.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

ENGINE_PROTOCOL_VERSION = 1

Handle: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""An API server's own number for one stream, echoed in every row; int32 on the wire."""
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]


KVTransferParams: TypeAlias = bytes
"""What a connector of KV caches says about one request, to its like and through clients: a JSON object."""
Incarnation: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A run of the supervisor that a process belongs to, see :func:`penstock.wire.sockets.new_incarnation`."""

OVERLOADED = "overloaded"
"""StreamFailed.code of a stream that was refused, or given up before it ran, for lack of room in the
queue."""


SLEEPING = "sleeping"
"""StreamFailed.code of a stream that ended, or was refused, because its engine is put to sleep."""
CONFLICT = "conflict"
"""RpcReply.code of a call that cannot run beside another one: its key has been used for something else, or
another change is under way."""
MAX_IDEMPOTENCY_KEY_LENGTH = 255
"""Characters of RpcCall.key."""


class WireError(ValueError):
    """Bytes from a peer that are not a valid message."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How one stream is sampled and when it ends. Values are validated by the API server.

    The token at position p of a stream is a function of the logits and (seed, p) alone.
    """

    max_tokens: Count
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1
    """Alternatives per generated token; -1: no logprobs, 0: the sampled token's only."""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    grammar: str | None = None
    """What the output must match, as llguidance reads it: JSON, or Lark."""
    seeded: bool = False
    """Whether the request names its seed; otherwise any other would do."""


# -- API server → engine


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """First message of an API server (index, restarts so far) to an engine; answered by Welcome."""

    protocol: int
    server: Count
    epoch: Count
    incarnation: Incarnation = 0
    connection: Count = 0
    """Of those that this API server has made to this engine."""


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Start a stream. The engine owes it exactly one end: a row with a finish, StreamFailed, or GoAway."""

    stream: Handle
    prompt: bytes
    """Token ids, int32 little-endian."""
    sampling: SamplingParams
    interval: Annotated[int, Meta(ge=1, lt=1 << 15)] = 1
    """Tokens per row; the first token and the last ones are sent at once."""
    priority: int = 0
    cache_salt: str | None = None
    resumed: Count = 0
    """How many tokens at the prompt's end are output of this stream, generated elsewhere before."""
    interval_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Least time between rows, but for the first and the last; 0: none."""
    adapter: str | None = None
    """Name of one of EngineInfo.adapters; None: the model as it is."""
    kv_transfer_params: KVTransferParams | None = None


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Stop streams; each still gets its end: a row with FinishReason.ABORT, unless it had already ended."""

    streams: list[Handle]
    stopped: bool = False
    """Their text has reached a stop string: they end well, and need no more tokens."""


class Disconnect(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """The API server leaves; its streams are dropped."""


class RpcPhase(enum.IntEnum):
    """What a call asks for. The last three are steps of a change that all engines make or none: ``method``
    names the state that changes, ``key`` the change."""

    RUN = 0
    PREPARE = 1
    """Do all of the change that could fail, and hold it."""
    COMMIT = 2
    """The change is decided: make it, prepared or not."""
    ABORT = 3
    """It is not: undo what was prepared."""


class RpcCall(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Run a named operation once, between steps; answered by RpcReply."""

    call: Count
    method: str
    arguments: dict[str, Any] = {}
    key: Annotated[str, Meta(max_length=MAX_IDEMPOTENCY_KEY_LENGTH)] = ""
    """Another call with this key gets the first one's reply; empty: each call runs."""
    phase: RpcPhase = RpcPhase.RUN
    version: Count = 0
    """With COMMIT: which decision this is; later ones have greater numbers."""


# -- engine → API server


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A variant of the model: low-rank additions to its weights, which an engine has loaded."""

    name: str
    path: str
    parent: str | None = None
    """The model it was trained on; None: the served one."""


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """What an engine serves with; the same on every rank."""

    engine: str
    max_model_len: Count
    vocab_size: Count
    max_num_seqs: Count
    eos_token_ids: tuple[TokenId, ...] = ()
    device: str = "cpu"
    dtype: str = ""
    kv_cache_tokens: Count = 0
    """Capacity of the KV cache in tokens; 0 when the engine has none."""
    adapters: tuple[Adapter, ...] = ()
    """Whose names requests may give as their model."""
    transfers_kv: bool = False
    """Whether it heeds Submit.kv_transfer_params."""
    max_loras: Count = 0
    """Adapters that can run at the same time; 0: it has none."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=16):
    protocol: int
    rank: Count
    epoch: Count
    info: EngineInfo
    incarnation: Incarnation = 0


class FrameHeader(msgspec.Struct, array_like=True, frozen=True, tag=17, gc=False):
    """Header of a token frame: which columns follow, and the engine's load at that step."""

    step: Annotated[int, Meta(ge=0)]
    columns: list[Count]
    """Flat (column id, element count) pairs, in the order of the raw bytes."""
    waiting: Count = 0
    running: Count = 0
    kv_used_permille: Annotated[int, Meta(ge=0, le=1000)] = 0
    accepted: Count = 0
    """Submits the engine had taken from this connection, so that those the load cannot contain are known."""
    kv_transfer_params: dict[Handle, KVTransferParams] | None = None
    """For the replies of streams that end in this frame."""


class StreamFailed(msgspec.Struct, array_like=True, frozen=True, tag=18, gc=False):
    """A stream's end by an error; every token it generated was sent before."""

    stream: Handle
    position: Count
    """Tokens generated."""
    code: str
    """invalid_request, engine_error or OVERLOADED."""
    message: str
    retry_after_ms: Count = 0
    """With OVERLOADED: when there is likely to be room."""


class RpcReply(msgspec.Struct, array_like=True, frozen=True, tag=19):
    call: Count
    error: str | None = None
    result: Any = None
    step: Annotated[int, Meta(ge=0)] = 0
    """Frames that the engine had published when it ran."""
    repeated: bool = False
    """It ran earlier, for a call with the same key; to PREPARE: the change was made earlier."""
    code: str = ""
    """CONFLICT, or nothing that an API server needs to tell apart."""


class GoAway(msgspec.Struct, array_like=True, frozen=True, tag=20, gc=False):
    """The engine ends in order; nothing follows. It runs none of its streams any further, whose tokens were
    all sent before; an API server may resume them elsewhere."""

    reason: str


class Draining(msgspec.Struct, array_like=True, frozen=True, tag=22, gc=False):
    """The engine finishes what it runs, wants no new streams, and says GoAway when it has none."""


class EngineMetrics(msgspec.Struct, array_like=True, frozen=True, tag=21, gc=False):
    """What the engine has counted since its start, and its load; sent once a second while it changes."""

    snapshot: bytes
    """Encoded, see :mod:`penstock.metrics.snapshot`."""
    waiting: Count = 0
    running: Count = 0
    kv_used_permille: Annotated[int, Meta(ge=0, le=1000)] = 0


FromServer: TypeAlias = Hello | Submit | Abort | Disconnect | RpcCall
FromEngine: TypeAlias = Welcome | FrameHeader | StreamFailed | RpcReply | GoAway | EngineMetrics | Draining

encode = msgspec.msgpack.Encoder().encode
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

_REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises; the last two within RpcCall.arguments and RpcReply.result."""


Message = TypeVar("Message")


def decoded(decoder: msgspec.msgpack.Decoder[Message], part: bytes | memoryview, whose: str) -> Message:
    """A message, of whose kind ``whose`` tells. Raises WireError."""
    try:
        return decoder.decode(part)
    except _REFUSALS as error:
        raise WireError(f"not a message {whose}: {error}") from None


def decode_from_server(part: bytes | memoryview) -> FromServer:
    """One control message of an API server. Raises WireError."""
    message = decoded(_from_server, part, "of an API server")
    if isinstance(message, Submit) and (not message.prompt or len(message.prompt) % 4):
        raise WireError(f"Submit.prompt has {len(message.prompt)} bytes, not a positive multiple of 4")
    return message


def decode_from_engine(part: bytes | memoryview) -> FromEngine:
    """One control message, or the header of a token frame. Raises WireError."""
    return decoded(_from_engine, part, "of an engine")
