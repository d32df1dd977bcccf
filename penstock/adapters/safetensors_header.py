"""The header of a safetensors file: where each tensor lies.

A file is the header's length (8 bytes, little-endian), the header (JSON), and the tensors' bytes. The format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.adapters.errors import AdapterError, json_problem

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 25
MAX_TENSORS = 1 << 17
"""Twice the layers of a model with 60 blocks of 256 experts, and a few more."""
MAX_NAME_CHARS = 512
MAX_FILE_BYTES = 1 << 34
"""Of an adapter."""
MAX_SIZE = 1 << 39
"""Largest shape or offset: half a terabyte."""

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, by dtype: of an adapter's tensors."""

_Size: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SIZE)]


@dataclass(slots=True, frozen=True)
class TensorView:
    """Where a tensor's elements lie, in C order and little-endian."""

    dtype: str
    """As safetensors calls it, such as ``BF16``."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte among the tensors' bytes."""
    end: int
    """Offset after its last byte."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


def parse_header_length(start: bytes, file: str, size: int, max_bytes: int = MAX_FILE_BYTES) -> int:
    """Length of the header of ``file``, which has ``size`` bytes, by its first bytes. Raises AdapterError."""
    if size > max_bytes:
        raise AdapterError(f"{file}: it has {size} bytes; the maximum is {max_bytes}")
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or LENGTH_BYTES + length > size:
        raise AdapterError(
            f"{file}: it is not a safetensors file: its header does not fit in its {size} bytes"
        )
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"{file}: its header has {length} bytes; the maximum is {MAX_HEADER_BYTES}")
    return length


def parse_header(
    header: bytes, file: str, size: int, item_bytes: Mapping[str, int] = ITEM_BYTES
) -> dict[str, TensorView]:
    """The tensors by name, in the order of their bytes, of which there are ``size``. ``item_bytes``: bytes of
    an element, by the dtypes that tensors may have. Raises AdapterError."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{file}: header: {json_problem(error)}") from None
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise AdapterError(f"{file}: it has {len(entries)} tensors; the maximum is {MAX_TENSORS}")
    tensors = [
        (_checked_name(name, file), _parse_entry(name, raw, file, item_bytes))
        for name, raw in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor[1].start, tensor[1].end))
    end = 0
    for name, view in tensors:
        if view.start != end:
            raise AdapterError(f"{file}: tensor {name}: it begins at byte {view.start}, not at {end}")
        end = view.end
    if end != size:
        raise AdapterError(f"{file}: its tensors have {end} bytes, and the file has {size} for them")
    return dict(tensors)


def _checked_name(name: str, file: str) -> str:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise AdapterError(
            f"{file}: tensor {name[:100]!r}: a name has at most {MAX_NAME_CHARS} characters, all printable"
        )
    return name


def _parse_entry(name: str, raw: msgspec.Raw, file: str, item_bytes: Mapping[str, int]) -> TensorView:
    where = f"{file}: tensor {name}"
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{where}: {json_problem(error)}") from None
    item = item_bytes.get(entry.dtype)
    if item is None:
        raise AdapterError(
            f"{where}: its dtype is {entry.dtype!r}; it must be one of {', '.join(item_bytes)}"
        )
    start, end = entry.data_offsets
    if end - start != math.prod(entry.shape) * item:
        raise AdapterError(
            f"{where}: {end - start} bytes are not those of the shape {list(entry.shape)} in {entry.dtype}"
        )
    return TensorView(entry.dtype, entry.shape, start, end)
