"""KV cache events: what an engine's prefix cache has gained and lost, as vLLM publishes it.

A message of the PUB socket has three parts: the topic, the batch's number (8 bytes, big-endian, from 0 on),
and the batch in msgpack. A subscriber that missed some sends an empty part and the first number wanted to the
ROUTER socket. It gets an empty part, topic, number and batch of each one that is kept, and then
:data:`END_OF_REPLAY` as the number. Sockets and fields are those of vLLM 0.32; :func:`decode_batch` reads the
events of earlier versions as well, which are arrays.

A batch has any number of events, in their order:

================  ======  ===========  ======
message           sender  receiver     answer
================  ======  ===========  ======
BlockStored       engine  subscribers  none
BlockRemoved      engine  subscribers  none
AllBlocksCleared  engine  subscribers  none
================  ======  ===========  ======
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM_GPU = "GPU"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Full blocks of one history, one after the other, can be reused. vLLM's decoder needs all fields without
    a default."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Hash of the block before them; None: they begin the history."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    """What a block's hash covers beside tokens, for each block: adapter, pictures, cache salt."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks can no longer be reused."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, gc=False, tag=True):
    """No block can be reused."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    """Seconds since 1970."""
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Batch).decode
_decode_any = msgspec.msgpack.Decoder(_AnyBatch).decode
_KINDS: dict[str, type[KVCacheEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}

_SINCE = {"lora_id": None, "medium": None, "lora_name": None}
"""Fields that events of earlier versions lack."""


def encode_batch(at: float, events: list[KVCacheEvent], rank: int) -> bytes:
    return _encode(_Batch(at, events, rank))


def decode_batch(data: bytes) -> list[KVCacheEvent]:
    """The events of a batch. Those of unknown kinds are left out. Raises ValueError."""
    try:
        return _decode(data).events
    except msgspec.ValidationError:
        pass
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not msgpack: {error}") from None
    try:
        return list(_lenient(_decode_any(data).events))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _lenient(events: list[Any]) -> Iterator[KVCacheEvent]:
    """Raises msgspec.ValidationError, TypeError, ValueError."""
    for event in events:
        if isinstance(event, list):
            name, *values = event
            kind = _KINDS.get(name)
            named = {} if kind is None else dict(zip(kind.__struct_fields__, values, strict=False))
        elif isinstance(event, dict):
            kind = _KINDS.get(event.get("type", ""))
            named = event
        else:
            raise ValueError(f"an event is {type(event).__name__}")
        if kind is not None:
            yield msgspec.convert({**_SINCE, **named, "type": kind.__name__}, kind)
