"""Writes safetensors files: a header's length (8 bytes, little-endian), the header (JSON), tensors' bytes.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.http.errors import encode_json

SAFETENSORS = b"application/vnd.safetensors"
_DTYPES = {np.dtype(np.int64): "I64", np.dtype(np.int32): "I32", np.dtype(np.float32): "F32"}
_ALIGNMENT = 8
"""The header is padded to a multiple of it, so that the tensors of a file at such an address are aligned."""
PIECE_BYTES = 512 * 1024
"""Bytes of a piece, except for the last one: half a millisecond to copy."""

Part: TypeAlias = NDArray[Any]


class Tensor(NamedTuple):
    """One tensor, in parts along its first dimension."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[Part]
    """Used once, when the file is written; each takes less than a millisecond to make."""


def tensor_of(name: str, parts: Sequence[Part]) -> Tensor:
    """A tensor of these parts, of which there is at least one."""
    return Tensor(name, parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]), parts)


class SafetensorsFile(NamedTuple):
    """A file to send."""

    header: bytes
    """With its length."""
    tensors: Sequence[Tensor]
    size: int
    """Bytes of the file."""

    def pieces(self) -> Iterator[bytes]:
        """The file, once, in pieces of at least PIECE_BYTES, and less than twice as many; the last one may be
        smaller."""
        waiting, size = [self.header], len(self.header)
        for tensor in self.tensors:
            for part in tensor.parts:
                row = part.itemsize * math.prod(part.shape[1:])
                step = max(1, PIECE_BYTES // max(1, row))
                for start in range(0, len(part), step):
                    waiting.append(part[start : start + step].tobytes())
                    size += len(waiting[-1])
                    if size >= PIECE_BYTES:
                        yield b"".join(waiting)
                        waiting, size = [], 0
        yield b"".join(waiting)

    def whole(self) -> bytes:
        """The file."""
        return b"".join(self.pieces())


def safetensors_file(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> SafetensorsFile:
    """A file of these tensors, in this order. ``metadata``: its ``__metadata__``."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.dtype.itemsize * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = encode_json(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return SafetensorsFile(head, tensors, len(head) + end)
