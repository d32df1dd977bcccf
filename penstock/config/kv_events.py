"""``--kv-events-config``: whether engines publish KV cache events, and where. The fields are vLLM's."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_TCP_PORT = re.compile(r"(tcp://.+):(\d{1,5})")


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine publishes the events of its prefix cache."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: zmq if events are enabled."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the first rank's PUB socket; rank N has the port N above. vLLM's default is all interfaces:
    here that is to be asked for, since prompts can be read from the events."""
    replay_endpoint: str | None = None
    """Address of the first rank's ROUTER socket, where subscribers ask for batches that they missed."""
    buffer_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Batches kept for replay."""
    hwm: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Batches queued for a slow subscriber; later ones are dropped."""
    max_queue_size: Annotated[int, Meta(ge=1)] = 100_000
    """vLLM's queue to its publisher's thread; Penstock's engines publish without one."""
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events_config(text: str) -> KVEventsConfig:
    """Raises ValueError for what is not valid, with the field's name."""
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        fields = ", ".join(KVEventsConfig.__struct_fields__)
        raise ValueError(
            f"--kv-events-config {text[:200]}: {error}; it takes a JSON object with {fields}"
        ) from None
    for field in ("endpoint", "replay_endpoint"):
        address: str | None = getattr(config, field)
        if address is not None and not _is_address(address):
            raise ValueError(
                f"--kv-events-config: {field} {address!r} is not allowed; it takes tcp://HOST:PORT "
                "(HOST may be * for all interfaces) or ipc://PATH"
            )
    return config


def _is_address(address: str) -> bool:
    match = _TCP_PORT.fullmatch(address)
    if match is None:
        return address.startswith("ipc://") and len(address) > len("ipc://")
    return int(match[2]) <= 65535


def address_of_rank(address: str, rank: int) -> str:
    """The address of a rank: the port is as many above that of the first one, as vLLM has it; an ipc path
    has the rank as its end. Raises ValueError if there is no such port."""
    match = _TCP_PORT.fullmatch(address)
    if match is None:
        return address if rank == 0 else f"{address}_dp{rank}"
    base = int(match[2])
    port = base + rank if base else 0
    if port > 65535:
        raise ValueError(f"--kv-events-config: {address} leaves no port for rank {rank}")
    return f"{match[1]}:{port}"


def check_addresses(config: KVEventsConfig, ranks: int) -> None:
    """Raises ValueError if a rank has no port, or two sockets of them all would have one."""
    addresses = Counter(
        address_of_rank(first, rank)
        for first in (config.endpoint, config.replay_endpoint)
        if first is not None
        for rank in range(ranks)
    )
    for address, sockets in addresses.items():
        if sockets > 1 and not address.endswith(":0"):
            raise ValueError(
                f"--kv-events-config: {ranks} ranks share {address}; endpoint and replay_endpoint have to be "
                "further apart"
            )
