"""What an API server and the receiver of broadcast weights tell each other.

The receiver (:mod:`penstock.engine.weights.receiver_main`) is a member of a trainer's process group. It
listens in the run directory. A connection is one transfer: a :class:`Transfer`, a line of JSON, and the
:class:`TransferResult`, another one. Whoever closes it before ends the receiver.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

TensorType = Literal["float64", "float32", "float16", "bfloat16", "uint8"]

STORED_TYPES: dict[TensorType, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint8": ("U8", 1),
}
"""What safetensors calls each type, and the bytes of an element."""
RECEIVER_SOCKET = "weights.sock"
"""In the run directory."""
RECEIVER_LOCK = "weights.lock"
"""In the run directory; held by the API server whose call is about the receiver."""
MAX_RESULT_BYTES = 1 << 16
"""Longest line that a receiver sends."""


class BroadcastTensor(NamedTuple):
    """A tensor that rank 0 broadcasts."""

    name: str
    dtype: TensorType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * STORED_TYPES[self.dtype][1]


class TransferGroup(msgspec.Struct, frozen=True):
    """The process group that a receiver joins."""

    socket: str
    """Path of the socket on which it listens from then on."""
    master_address: str
    master_port: int
    rank: int
    world_size: int


class Transfer(msgspec.Struct, frozen=True):
    """One broadcast after the other, into a new safetensors file."""

    path: str
    tensors: list[BroadcastTensor]


class TransferResult(msgspec.Struct, frozen=True):
    """How a transfer, or joining the group, has ended."""

    error: str = ""
    """Empty: it was done."""
