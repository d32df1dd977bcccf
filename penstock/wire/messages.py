"""Messages between API servers and engines: what crosses the ZMQ socket, and how it is encoded.

=============  ==========  ==========  ==============================================================
message        sender      receiver    answer
=============  ==========  ==========  ==============================================================
Hello          API server  engine      Welcome
Submit         API server  engine      FrameHeader with the stream's rows, the last one with a finish
                                       reason; or StreamFailed; or GoAway
Abort          API server  engine      FrameHeader with the streams' last rows
Disconnect     API server  engine      none
RpcCall        API server  engine      RpcReply
Welcome        engine      API server  none
FrameHeader    engine      API server  none; columns follow, see :mod:`penstock.wire.frames`
StreamFailed   engine      API server  none
RpcReply       engine      API server  none
EngineMetrics  engine      API server  none
Draining       engine      API server  none
GoAway         engine      API server  none; the engine exits
=============  ==========  ==========  ==============================================================

Typed, array-like msgpack. Field order is the wire format: append fields, never insert or reuse one. A ZMQ
message is a list of parts. An API server sends one or more messages, one per part. An engine sends either
one message, or a token frame: a FrameHeader part and a part of raw columns.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

ENGINE_PROTOCOL_VERSION = 2

Handle: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""An API server's number for one stream, repeated in every row; int32 on the wire."""
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

KVTransferParams: TypeAlias = bytes
"""A JSON object by which KV cache connectors describe one request to each other, also through clients."""
Incarnation: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""The supervisor run that a process belongs to, see :func:`penstock.wire.sockets.new_incarnation`."""

OVERLOADED = "overloaded"
"""StreamFailed.code of a stream that was rejected or dropped from the queue, because the queue is full."""
SLEEPING = "sleeping"
"""StreamFailed.code of a stream that was ended or rejected because its engine sleeps."""
CONFLICT = "conflict"
"""RpcReply.code of a call that conflicts with another one: its key was used for something else, or another
change is in progress."""
MAX_IDEMPOTENCY_KEY_LENGTH = 255
"""Maximum characters of RpcCall.key."""


class WireError(ValueError):
    """Bytes of a peer that are not a valid message."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How one stream is sampled and when it ends. The API server validates the values.

    The token at position p of a stream is a function of the logits and (seed, p) alone.
    """

    max_tokens: Count
    seed: Seed
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1
    """Alternatives per generated token; 0: only the sampled token's logprob, -1: no logprobs."""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    grammar: str | None = None
    """A grammar that the output must match, in llguidance's format: JSON or Lark."""
    seeded: bool = False
    """Whether the request set the seed; otherwise it is arbitrary."""


# -- API server → engine


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """First message of an API server on a connection. ``epoch`` counts the API server's restarts."""

    protocol: int
    server: Count
    epoch: Count
    incarnation: Incarnation = 0
    connection: Count = 0
    """Number of this connection among those from this API server to this engine."""


class SubmitChoice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A further stream of a Submit, and the fields in which it differs from the first one."""

    stream: Handle
    seed: Seed
    max_tokens: Count
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1
    prompt: bytes | None = None
    """Token ids, int32 little-endian; None: the first stream's prompt without its ``resumed`` tokens."""
    output: bytes = b""
    """Token ids to append to the prompt: what another engine has generated of this stream."""


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Start a stream, and ``choices`` others of the same request. Each ends exactly once: by a row with a
    finish reason, StreamFailed, or GoAway."""

    stream: Handle
    prompt: bytes
    """Token ids, int32 little-endian."""
    sampling: SamplingParams
    interval: Annotated[int, Meta(ge=1, lt=1 << 15)] = 1
    """Tokens per row; the first token and the last ones are sent immediately."""
    priority: int = 0
    cache_salt: str | None = None
    resumed: Count = 0
    """Tokens at the prompt's end that are output of this stream, generated by another engine."""
    interval_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Minimum milliseconds between rows, except the first and the last."""
    adapter: str | None = None
    """Name of one of EngineInfo.adapters; None: the base model."""
    kv_transfer_params: KVTransferParams | None = None
    choices: tuple[SubmitChoice, ...] = ()
    """Further streams, which share all other fields: see :mod:`penstock.wire.submits`."""


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Stop streams. Each still gets a last row, with FinishReason.ABORT, unless it had already ended."""

    streams: list[Handle]
    stopped: bool = False
    """They are complete, as their text contains a stop string; metrics count them so."""


class Disconnect(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """The API server disconnects; the engine drops its streams."""


class RpcPhase(enum.IntEnum):
    """What a call does. The last three are phases of a two-phase commit over all engines: ``method`` names
    the state that changes, ``key`` the change."""

    RUN = 0
    PREPARE = 1
    """Do every part of the change that may fail, but do not make it."""
    COMMIT = 2
    """The change is decided: make it, even if it was not prepared."""
    ABORT = 3
    """The change is rejected: undo the preparation."""


class RpcCall(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Run a named operation once, between steps."""

    call: Count
    method: str
    arguments: dict[str, Any] = {}
    key: Annotated[str, Meta(max_length=MAX_IDEMPOTENCY_KEY_LENGTH)] = ""
    """Idempotency key: another call with it gets the first one's reply. Empty: every call runs."""
    phase: RpcPhase = RpcPhase.RUN
    version: Count = 0
    """With COMMIT: number of the decision; later ones have greater numbers."""


# -- engine → API server


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that an engine has loaded."""

    name: str
    path: str
    parent: str | None = None
    """Name of its base model; None: the served model."""


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """Limits and properties of an engine; equal on every rank."""

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
    """Requests may name them as their model."""
    transfers_kv: bool = False
    """Whether it supports Submit.kv_transfer_params."""
    max_loras: Count = 0
    """Adapters that can run at the same time; 0 without adapters."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=16):
    """The engine accepts the connection. ``epoch`` counts the engine's restarts."""

    protocol: int
    rank: Count
    epoch: Count
    info: EngineInfo
    incarnation: Incarnation = 0


class FrameHeader(msgspec.Struct, array_like=True, frozen=True, tag=17, gc=False):
    """Header of a token frame: the columns that follow, and the engine's load after that step."""

    step: Annotated[int, Meta(ge=0)]
    columns: list[Count]
    """Flat (column id, element count) pairs, in the order of the raw bytes."""
    waiting: Count = 0
    running: Count = 0
    kv_used_permille: Annotated[int, Meta(ge=0, le=1000)] = 0
    accepted: Count = 0
    """Submits taken from this connection so far; the load does not include later ones."""
    kv_transfer_params: dict[Handle, KVTransferParams] | None = None
    """By stream, for streams that end in this frame."""


class StreamFailed(msgspec.Struct, array_like=True, frozen=True, tag=18, gc=False):
    """A stream ended with an error. All its tokens were sent before."""

    stream: Handle
    position: Count
    """Tokens generated."""
    code: str
    """invalid_request, engine_error or OVERLOADED."""
    message: str
    retry_after_ms: Count = 0
    """With OVERLOADED: estimated time until the queue has room."""


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
    kv_used_permille: Annotated[int, Meta(ge=0, le=1000)] = 0


FromServer: TypeAlias = Hello | Submit | Abort | Disconnect | RpcCall
FromEngine: TypeAlias = Welcome | FrameHeader | StreamFailed | RpcReply | GoAway | EngineMetrics | Draining

encode = msgspec.msgpack.Encoder().encode
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

_REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises; the last two only within RpcCall.arguments and RpcReply.result."""

Message = TypeVar("Message")


def decoded(decoder: msgspec.msgpack.Decoder[Message], part: bytes | memoryview, whose: str) -> Message:
    """Decodes one message. Raises WireError, whose text names the message as "a message ``whose``"."""
    try:
        return decoder.decode(part)
    except _REFUSALS as error:
        raise WireError(f"not a message {whose}: {error}") from None


def decode_from_server(part: bytes | memoryview) -> FromServer:
    """Decodes one message of an API server. Raises WireError."""
    message = decoded(_from_server, part, "of an API server")
    if isinstance(message, Submit):
        _check_token_bytes("Submit.prompt", message.prompt)
        for choice in message.choices:
            if choice.prompt is not None:
                _check_token_bytes("SubmitChoice.prompt", choice.prompt)
            if choice.output:
                _check_token_bytes("SubmitChoice.output", choice.output)
    return message


def _check_token_bytes(field: str, value: bytes) -> None:
    if not value or len(value) % 4:
        raise WireError(f"{field} has {len(value)} bytes, not a positive multiple of 4")


def decode_from_engine(part: bytes | memoryview) -> FromEngine:
    """Decodes one message of an engine, which may be the header of a token frame. Raises WireError."""
    return decoded(_from_engine, part, "of an engine")
