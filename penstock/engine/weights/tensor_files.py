"""The tensors of a weight source: one safetensors file or a directory of them, mapped into memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from penstock.wire.weights import WeightSource

INDEX = "model.safetensors.index.json"
NAMES_SHOWN = 3
"""Maximum tensor names in an error."""


class StoredTensor(NamedTuple):
    """A tensor in a file. Its bytes are read when they are used."""

    file: Any
    """The open file, of safetensors."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it, such as ``BF16``."""

    def read(self) -> Any:
        """The tensor, a view of the mapped file."""
        return self.file.get_tensor(self.name)


class TensorFiles:
    """The open files of some sources. Later tensors of a name replace earlier ones."""

    def __init__(self, sources: Sequence[WeightSource], framework: str) -> None:
        """``framework``: of the tensors, as safetensors calls it. Raises ValueError for what cannot be opened
        or lacks a tensor."""
        self._files = ExitStack()
        self.tensors: dict[str, StoredTensor] = {}
        self.count = 0
        """Tensors in all sources."""
        self.whole = bool(sources) and sources[0].tensors is None
        """Whether the first source is to have all tensors of a model."""
        self.named: set[str] = set()
        """Names that were asked for: of all sources but such a first one."""
        try:
            for index, source in enumerate(sources):
                names = self._add(source, framework)
                if index or not self.whole:
                    self.named |= names
        except BaseException:
            self.close()
            raise

    def _add(self, source: WeightSource, framework: str) -> set[str]:
        """Open a source. Returns the names of its tensors."""
        from safetensors import SafetensorError, safe_open

        found: dict[str, StoredTensor] = {}
        for path in _files_of(Path(source.path)):
            if path.exists() and not path.is_file():  # to open a pipe waits for its other end
                raise ValueError(f"{path} cannot be read: it is no regular file")
            try:
                file = self._files.enter_context(safe_open(path, framework=framework))
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    part = file.get_slice(name)
                    found[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
        if not found:
            raise ValueError(f"{source.path} has no tensors")
        wanted = found.keys() if source.tensors is None else source.tensors
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(f"{source.path} has no tensor {shown(missing)}")
        self.tensors |= {name: found[name] for name in wanted}
        self.count += len(wanted)
        return set(wanted)

    def close(self) -> None:
        self.tensors = {}
        self._files.close()


def _files_of(path: Path) -> list[Path]:
    """The safetensors files of a source, in order. Raises ValueError."""
    if not path.is_absolute():
        raise ValueError(f"path is {str(path)!r}, not an absolute path")
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.exists():
        return sorted(path.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [path / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read: {error}") from None


def shown(names: Sequence[str]) -> str:
    """Some names for an error."""
    return ", ".join(names[:NAMES_SHOWN]) + (f", … ({len(names)})" if len(names) > NAMES_SHOWN else "")
