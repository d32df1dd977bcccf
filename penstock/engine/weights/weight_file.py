"""The safetensors files of a weight source, and the digest that tells them from others of the same name.

Files may be anything and may change at any time. A pipe or a device is refused before it is read. The digest
covers file names, headers and a kilobyte of each tensor, so it takes a millisecond where all bytes would take
as long as the update: it finds out another version of the weights, not a forgery.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.adapters.errors import AdapterError, json_problem
from penstock.adapters.safetensors_header import (
    LENGTH_BYTES,
    MAX_SIZE,
    TensorView,
    parse_header,
    parse_header_length,
)
from penstock.wire.weights.desired import WeightSource

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26
PIECES, PIECE_BYTES = 4, 256
"""What the digest covers of a tensor: so many pieces of so many bytes, from its first to its last one."""
DIGEST_BYTES = 16
ITEM_BYTES = {
    kind: size
    for size, kinds in {
        1: ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"],
        2: ["U16", "I16", "F16", "BF16"],
        4: ["U32", "I32", "F32"],
        8: ["U64", "I64", "F64", "C64"],
    }.items()
    for kind in kinds
}
"""Bytes of an element, by dtype: of all that safetensors files have. Engines take some of them."""
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class _Index(msgspec.Struct):
    weight_map: dict[str, Any]
    """The file of each tensor."""


class WeightFile:
    """An open safetensors file."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError."""
        self.path = path
        try:
            self._fd = os.open(path, _OPEN)
            try:
                self._read_header()
            except BaseException:
                os.close(self._fd)
                raise
        except (OSError, AdapterError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{path} cannot be read: {reason}") from None

    def _read_header(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError("it is no regular file")
        name, size = self.path.name, status.st_size
        length = parse_header_length(os.pread(self._fd, LENGTH_BYTES, 0), name, size, MAX_SIZE)
        self.header = os.pread(self._fd, length, LENGTH_BYTES)
        self.start = LENGTH_BYTES + length
        """Offset of the tensors' bytes."""
        self.tensors: dict[str, TensorView] = parse_header(self.header, name, size - self.start, ITEM_BYTES)

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def map(self) -> mmap.mmap:
        """The whole file, mapped for as long as anything refers to it. What is written to it stays here."""
        return mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)

    def sample(self, *, finite: bool) -> bytes:
        """What the digest covers. With ``finite``, raises ValueError for a value in it that is infinite or
        not a number."""
        parts = [self.path.name.encode(), len(self.header).to_bytes(8, "little"), self.header]
        for name, view in self.tensors.items():
            pieces = [os.pread(self._fd, size, self.start + at) for at, size in _places(view)]
            parts += pieces
            if finite and not _is_finite(b"".join(pieces), view.dtype):
                raise ValueError(f"{self.path}: {name} has values that are infinite or not a number")
        return b"".join(parts)


def _places(view: TensorView) -> list[tuple[int, int]]:
    """(offset, bytes) of the pieces of a tensor, from its first to its last element, all of them whole."""
    size = view.end - view.start
    if size <= PIECES * PIECE_BYTES:
        return [(view.start, size)]
    item, last = ITEM_BYTES[view.dtype], size - PIECE_BYTES
    return [
        (view.start + last * index // (PIECES - 1) // item * item, PIECE_BYTES) for index in range(PIECES)
    ]


def _is_finite(data: bytes, dtype: str) -> bool:
    """Whether there is neither infinity nor NaN; true of types that have neither."""
    if dtype == "BF16":
        return bool(np.isfinite((np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")).all())
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}.get(dtype)
    return kind is None or bool(np.isfinite(np.frombuffer(data, kind)).all())


def files_of(source: WeightSource) -> Iterator[WeightFile]:
    """The files, opened one after the other; the last one is closed before the next is opened. Raises
    ValueError, at the end also for files that have other bytes than the source says."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in _paths(Path(source.path)):
        with WeightFile(path) as file:
            if source.digest:
                digest.update(file.sample(finite=False))
            yield file
    if source.digest and digest.hexdigest() != source.digest:
        raise ValueError(
            f"{source.path} has changed since the update: its digest is {digest.hexdigest()}, not "
            f"{source.digest}"
        )


def with_digest(source: WeightSource) -> WeightSource:
    """The source with the digest of its files. Raises ValueError for files that cannot be read, and for
    infinite values and NaN in what the digest covers."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file in files_of(source):
        digest.update(file.sample(finite=True))
    return msgspec.structs.replace(source, digest=digest.hexdigest())


def _paths(path: Path) -> list[Path]:
    """The paths of a source's files, in order. Raises ValueError."""
    if not path.is_absolute():
        raise ValueError(f"path is {str(path)!r}, not an absolute path")
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.exists():
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise ValueError(f"{path} has no safetensors files")
        return found
    try:
        if not index.is_file():
            raise ValueError("it is no regular file")
        with index.open("rb") as file:
            names = msgspec.json.decode(file.read(MAX_INDEX_BYTES), type=_Index).weight_map.values()
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or json_problem(error)
        raise ValueError(f"{index} cannot be read: {reason}") from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise ValueError(
                f"{index} cannot be read: it names {name!r}; it may name files in its own directory only"
            )
    return [path / name for name in sorted(set(names))]
