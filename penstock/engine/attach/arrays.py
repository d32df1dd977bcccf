"""Reads the arrays in vLLM's messages: numpy arrays and torch tensors as (dtype, shape, data). Those of
bfloat16, which numpy lacks, become float32.

``data`` is inline, as a msgpack extension of type 3, or the number of a further frame of the message. Other
extension types hold pickles, and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.engine.attach.step_output import LogprobArrays

RAW_VIEW = 3
"""Extension type of inline data."""
DTYPES = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "bool": "|b1",
}
"""numpy's dtypes by torch's names. Messages have either."""
BFLOAT16 = "bfloat16"
_ACCEPTED = frozenset(DTYPES.values())
MAX_DIMENSIONS = 3


class UnreadableArray(ValueError):
    """A value that is no array, or whose data does not have its shape."""


def read_array(value: Any, frames: Sequence[memoryview]) -> NDArray[Any]:
    """The array that ``value`` encodes, a view of its data but for bfloat16. ``frames``: those of the
    message. Raises UnreadableArray."""
    try:
        name, shape, data = value
    except (TypeError, ValueError):
        raise UnreadableArray(f"{type(value).__name__} instead of an array") from None
    dtype = DTYPES.get(name, name) if isinstance(name, str) else None
    if name == BFLOAT16:
        dtype = "<u2"
    elif dtype not in _ACCEPTED:
        raise UnreadableArray(f"an array of {str(name)[:80]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise UnreadableArray(f"an array of the shape {str(shape)[:80]}")
    if not all(isinstance(size, int) and 0 <= size < 1 << 40 for size in shape):
        raise UnreadableArray(f"an array of the shape {str(shape)[:80]}")
    buffer = _buffer(data, frames)
    item = np.dtype(dtype)
    if math.prod(shape) * item.itemsize != len(buffer):
        raise UnreadableArray(f"{len(buffer)} bytes of data for {name}{shape}")
    found = np.frombuffer(buffer, item).reshape(shape)
    if name == BFLOAT16:
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found


def read_logprobs(value: Any, frames: Sequence[memoryview]) -> LogprobArrays:
    """Logprobs of L tokens, from arrays of ids [L, W], logprobs [L, W] and ranks [L]. Raises
    UnreadableArray."""
    if not isinstance(value, list) or len(value) < 3:
        raise UnreadableArray(f"{type(value).__name__} instead of logprobs")
    ids, values, rank = (read_array(each, frames) for each in value[:3])
    if ids.ndim != 2 or values.shape != ids.shape or rank.shape != ids.shape[:1] or not ids.shape[1]:
        raise UnreadableArray(f"logprobs of the shapes {ids.shape}, {values.shape} and {rank.shape}")
    return LogprobArrays(ids.astype(np.int32), values.astype(np.float32), rank.astype(np.int32))


def _buffer(data: Any, frames: Sequence[memoryview]) -> memoryview:
    if isinstance(data, msgspec.msgpack.Ext):
        if data.code != RAW_VIEW:
            raise UnreadableArray(f"data of extension type {data.code}, which may be a pickle")
        return memoryview(data.data)
    if isinstance(data, int) and not isinstance(data, bool) and 0 < data < len(frames):
        return frames[data]
    if isinstance(data, int):
        raise UnreadableArray(f"data in frame {data} of {len(frames)}")
    raise UnreadableArray(f"{type(data).__name__} instead of data")
