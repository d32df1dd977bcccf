"""What a model directory says of the vectors, scores or labels that its model makes. Imports no torch: the
supervisor and API servers read it as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.wire.pooling import PoolingTask

Runner = Literal["auto", "generate", "pooling", "both"]
"""What a model is served for: text, vectors, or both; ``auto``: what its files say."""


@dataclass(frozen=True, kw_only=True)
class PoolingDescription:
    """The properties of a model that makes vectors, scores or labels."""

    tasks: tuple[PoolingTask, ...]
    """What it can make, the first one by default."""
    generates: bool = False
    """Whether it is to serve text as well."""
    width: int = 0
    """Values of a vector; 0: it makes none."""
    labels: tuple[str, ...] = ()
    """Names of its classifier's labels."""
    max_tokens: int
    """Tokens of the longest input, special ones included."""
    normalizes: bool = True
    """Whether its vectors have the length 1 unless a request says otherwise."""
    matryoshka: bool = True
    """Whether the first values of a vector are a vector, as far as its files say."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that come before inputs, by name, as sentence-transformers has them."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    """How vectors are compared."""


def describe_pooling(directory: Path, runner: Runner = "auto") -> PoolingDescription | None:
    """What the model in ``directory`` makes besides text; None: it only generates text. Raises ConfigError
    for files that cannot be used, or a model that cannot be what ``runner`` asks for."""
    return None
