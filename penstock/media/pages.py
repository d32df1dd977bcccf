"""The sealed file of a picture: the arrays that a processor has made of it, as safetensors.

The header's metadata has what an API server needs of a picture that it finds in the store, so that nothing is
decoded again: its tokens, its grid.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_HEADER_BYTES = 8 << 20
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class PageFacts(msgspec.Struct, array_like=True, frozen=True):
    """What is known of a picture besides its arrays."""

    ids: bytes
    """int32 little-endian: the tokens that take the placeholder's place."""
    features: int
    """How many of them are the image token."""
    grid: tuple[int, ...] = ()
    source_bytes: int = 0
    pixels: int = 0


class Pages(NamedTuple):
    facts: PageFacts
    arrays: dict[str, NDArray[Any]]
    """Read-only, over the given bytes."""


def sealed(facts: PageFacts, arrays: Mapping[str, NDArray[Any]]) -> list[bytes | memoryview]:
    """The pieces of a file. Raises KeyError for a dtype that is none of float16, float32, float64, int32,
    int64, uint8 and bool."""
    header: dict[str, Any] = {"__metadata__": {"penstock": msgspec.msgpack.encode(facts).hex()}}
    pieces: list[bytes | memoryview] = []
    at = 0
    for name, given in arrays.items():
        array = np.ascontiguousarray(given)
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        pieces.append(array.reshape(-1).view(np.uint8).data if array.nbytes else b"")
        at += array.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % 64)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def unsealed(data: bytes | memoryview) -> Pages:
    """The pages in a whole file. Raises ValueError for anything else."""
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError("no pages: its header is cut")
    try:
        header = msgspec.json.decode(view[8 : 8 + size])
        facts = msgspec.msgpack.decode(bytes.fromhex(header.pop("__metadata__")["penstock"]), type=PageFacts)
        body = view[8 + size :]
        arrays = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            array: NDArray[Any] = np.frombuffer(body[first:last], _DTYPES[entry["dtype"]]).reshape(
                entry["shape"]
            )
            array.flags.writeable = False
            arrays[name] = array
    except (KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise ValueError(f"no pages: {type(error).__name__}: {error}") from None
    return Pages(facts, arrays)


def read_facts(path: str | os.PathLike[str]) -> PageFacts:
    """The facts of a sealed file. Raises OSError and ValueError."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError("no pages: its header is cut")
        header = file.read(size)
    try:
        text = msgspec.json.decode(header)["__metadata__"]["penstock"]
        return msgspec.msgpack.decode(bytes.fromhex(text), type=PageFacts)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no pages: {error}") from None
