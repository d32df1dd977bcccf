"""The messages of vLLM's engine processes and their front end, as msgpack, and what of them is read.

Structs without field names on the wire are positional: fields keep their places, and versions append
further ones (:mod:`penstock.engine.attach.versions`), as plugins may; those are skipped. Others are
maps, of which unknown keys are skipped. Sources: ``vllm/v1/engine/__init__.py``, ``utils.py`` and
``core.py`` of vLLM 0.27 to 0.33.

Extension types 1 and 2 of vLLM's encoding hold pickles. Nothing here decodes them: they stay opaque values,
which no field takes.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

Tokens = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""A number of tokens of a request, or a token's id."""

ENGINE_DEAD = b"ENGINE_CORE_DEAD"
"""The only frame of an engine's last message, when it fails."""
ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
"""First frames of messages to an engine."""


class EngineLost(ConnectionError):
    """The engine is gone, broken, or cannot be understood. Its streams go on elsewhere."""


class VllmFinishReason(enum.IntEnum):
    """Why a request has finished. Later versions may have further ones."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


PREEMPTED = 3
"""``Event.type`` of a preemption; 1: queued, 2: scheduled."""


# -- engine → front end, at the handshake


class HandshakeMessage(msgspec.Struct, frozen=True):
    """HELLO, the first message of an engine, and READY, when it has loaded its model."""

    status: str
    headless: bool = False
    parallel_config_hash: str | None = None
    """Hash of the configuration of engines that step together."""


class ReadyResponse(msgspec.Struct, frozen=True):
    """First message of an engine on the socket where it takes requests."""

    max_model_len: Annotated[int, Meta(ge=2, lt=1 << 31)]
    vllm_version: Annotated[str, Meta(max_length=256)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 16)]
    num_gpu_blocks: Count = 0
    block_size: Count | None = None
    dtype: Annotated[str, Meta(max_length=64)] = ""
    data_parallel_size: Count = 1
    data_parallel_rank: Count = 0
    kv_cache_size_tokens: Count | None = None
    enable_sleep_mode: bool = False
    supports_lora: bool | None = None
    """None: its version does not tell."""
    max_loras: Count = 0


# -- engine → front end, in operation


class EngineCoreEvent(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to a request since its last output."""

    type: int = 0


class PrefillStats(msgspec.Struct, frozen=True, gc=False):
    num_cached_tokens: Tokens = 0
    num_external_cached_tokens: Tokens = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """EngineCoreOutput: what a step has made of one request."""

    request_id: str
    new_token_ids: list[Tokens]
    new_logprobs: Any = None
    """Arrays of ids, logprobs and ranks; see :mod:`penstock.engine.attach.arrays`."""
    new_prompt_logprobs: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: Any = 0
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None
    error: Any = None
    """A map with ``code``, ``message`` and ``retryable``, from 0.33 on."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but tokens that is read."""
        return (
            self.finish_reason is None
            and self.events is None
            and self.new_logprobs is None
            and self.new_prompt_logprobs is None
            and self.prefill_stats is None
        )


class PrefixCacheStats(msgspec.Struct, frozen=True, gc=False):
    """Lookups of the step in the prefix cache, in tokens."""

    queries: Count = 0
    hits: Count = 0


class SpecDecodingStats(msgspec.Struct, frozen=True, gc=False):
    """Drafts of the step."""

    num_drafts: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    num_accepted_tokens_per_pos: list[Count] = []


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    num_skipped_waiting_reqs: Count = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats | None = None
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    spec_decoding_stats: SpecDecodingStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True, frozen=True):
    """The answer to a call."""

    call_id: int
    failure_message: str | None = None
    result: Any = None
    """None, or (type, value), of which the type is None unless vLLM is told to send pickles."""


class Outputs(msgspec.Struct, array_like=True, frozen=True):
    """EngineCoreOutputs: what a step has made, or the answer to a call."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: Any = None
    wave_complete: Count | None = None
    start_wave: Count | None = None


# -- front end → engine


class Addresses(msgspec.Struct, frozen=True):
    """Where an engine connects."""

    inputs: list[str]
    """Sockets that send requests, one for each front end."""
    outputs: list[str]
    """Sockets that take outputs."""
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class HandshakeReply(msgspec.Struct, frozen=True):
    """The answer to HELLO."""

    addresses: Addresses
    parallel_config: dict[str, int | str | list[int]] = {}


_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    """As msgpack."""
    return _encoder.encode(value)


def encode_call(call_id: int, method: str, arguments: tuple[Any, ...]) -> tuple[bytes, bytes]:
    """The frames of a call (a "utility") of the engine's method ``method``."""
    return UTILITY, encode((0, call_id, method, arguments))


def encode_abort(request_ids: list[str]) -> tuple[bytes, bytes]:
    """The frames that abort requests; unknown ones are ignored."""
    return ABORT, encode(request_ids)
