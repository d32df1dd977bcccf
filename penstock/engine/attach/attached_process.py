"""An engine process of vLLM's that has described itself, and is connected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.adapters.lora_modules import lora_settings
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_core import AttachedCore
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.request_ids import MAX_SLOTS, RequestIds
from penstock.engine.attach.versions import check_version
from penstock.wire.pooling import PoolingInfo
from penstock.wire.vllm.messages import ReadyResponse

log = logging.getLogger(__name__)

AHEAD = 0.125
"""Requests that vLLM is given beyond those that it can run, as a fraction: a slot that it frees is filled in
its next step, without a message to here and back."""
MIN_AHEAD = 4
CALL_TIME = 0.8
"""Time for an answer, as a fraction of --engine-hang-timeout, after which this process would be killed."""


@dataclass(frozen=True, slots=True)
class AttachedProcess:
    """An engine process, attached."""

    connection: EngineConnection
    ready: ReadyResponse
    core: AttachedCore
    pooling: PoolingInfo | None = None
    """What it makes besides text; None: it makes text alone."""
    end: Callable[[], None] = lambda: None
    """End the engine process: it was started here. One that was not goes on."""


def read_ready(raw: bytes, config: ServeConfig, rank: int) -> ReadyResponse:
    """Return what the engine is. Raises ConfigError for one that this server cannot have."""
    try:
        ready = msgspec.msgpack.decode(raw, type=ReadyResponse)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(
            f"engine {rank} describes itself in a way that cannot be understood: {error}"
        ) from None
    check_version(ready.vllm_version, rank)
    if lora_settings(config).enabled and ready.supports_lora is False:
        raise ConfigError(f"--enable-lora: engine {rank} was started without --enable-lora")
    return ready


def make_core(
    config: ServeConfig,
    connection: EngineConnection,
    ready: ReadyResponse,
    rank: int,
    on_wait: Callable[[], None],
) -> AttachedCore:
    """Return the core of an engine that has answered a first call, by which its connection is known, and that
    is awake. ``on_wait`` is called while it does not answer. Raises EngineLost."""
    slots = min(MAX_SLOTS, ready.max_num_seqs + max(MIN_AHEAD, int(AHEAD * ready.max_num_seqs)))
    core = AttachedCore(connection, ready, RequestIds(slots), CALL_TIME * config.engine_hang_timeout)
    if core.call("is_sleeping", on_wait=on_wait):
        log.info("engine %d sleeps; it is woken up", rank)
        core.call("wake_up", on_wait=on_wait)
    if lora_settings(config).enabled:
        core.forget_adapters()
    return core
