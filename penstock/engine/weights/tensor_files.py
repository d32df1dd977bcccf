"""The tensors of some weight sources, mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.weights.weight_file import ITEM_BYTES, files_of
from penstock.wire.weights.desired import WeightSource

NAMES_SHOWN = 3
"""Maximum tensor names in an error."""
SEARCHED_BYTES = 1 << 17
"""Looked at twice while they are in the processor's cache."""


class StoredTensor(NamedTuple):
    """A tensor in a file. Its bytes are read when they are used."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it, such as ``BF16``."""
    data: memoryview
    """Its bytes, uint8, in the mapped file."""
    file: str
    """Path of the file."""

    def extremes(self) -> NDArray[Any]:
        """Some values of a floating-point type, as the integers that have their bits. The largest positive
        and the smallest negative one are among them, and NaN if there is any: they have the largest bits of
        all, as a signed integer or as an unsigned one."""
        signed, unsigned = f"<i{ITEM_BYTES[self.dtype]}", f"<u{ITEM_BYTES[self.dtype]}"
        bits, step = np.frombuffer(self.data, signed), SEARCHED_BYTES // ITEM_BYTES[self.dtype]
        pieces = [bits[start : start + step] for start in range(0, len(bits), step)]
        found = [np.array([piece.max(), piece.view(unsigned).max().view(signed)], signed) for piece in pieces]
        return np.concatenate([bits[:0], *found])


class TensorFiles:
    """The tensors of some sources. Later ones of a name replace earlier ones."""

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        """Raises ValueError for what cannot be read, lacks a tensor or has one twice, and for files that are
        others than the source says."""
        self.tensors: dict[str, StoredTensor] = {}
        """By name; those of later sources come later."""
        self.count = 0
        """Tensors in all sources."""
        self.whole = bool(sources) and not sources[0].is_part
        """Whether the sources begin with those that are to have all tensors of a model."""
        self.named: set[str] = set()
        """Names that the model must have: of all sources that are parts."""
        for source in sources:
            names = self._add(source)
            if source.is_part:
                self.named |= names

    def _add(self, source: WeightSource) -> set[str]:
        """Map a source's files. Returns the names of its tensors."""
        found: dict[str, StoredTensor] = {}
        for file in files_of(source):
            whole = memoryview(file.map())[file.start :]
            path = str(file.path)
            for name, view in file.tensors.items():
                if name in found:
                    raise ValueError(f"{name} is in {found[name].file} and in {path}")
                found[name] = StoredTensor(name, view.shape, view.dtype, whole[view.start : view.end], path)
        if not found:
            raise ValueError(f"{source.path} has no tensors")
        wanted = found.keys() if source.tensors is None else source.tensors
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(f"{source.path} has no tensor {shown(missing)}")
        added = {name: found[name] for name in wanted}
        self.tensors = {name: each for name, each in self.tensors.items() if name not in added} | added
        self.count += len(wanted)
        return set(wanted)

    def close(self) -> None:
        """Forget the tensors: files are mapped until no one else refers to them."""
        self.tensors = {}


def shown(names: Sequence[str]) -> str:
    """Some names for an error."""
    return ", ".join(names[:NAMES_SHOWN]) + (f", … ({len(names)})" if len(names) > NAMES_SHOWN else "")
