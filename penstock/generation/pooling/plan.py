"""The plan of a checked request for vectors, scores or labels, and what has been made of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from penstock.generation.replies.token_usage import TokenUsage
from penstock.wire.arrays import F32, I32
from penstock.wire.pooling import PoolingTask

PoolingInput: TypeAlias = str | bytes | tuple[str, str]
"""A text; token ids, int32 little-endian; or a pair of texts, which the model reads together."""


class PoolingPlan(msgspec.Struct, gc=False):
    """One validated request. Replies must escape its strings, except ``model``."""

    api: str
    """Name of the API in metrics."""
    model: str
    """The model name that replies report."""
    task: PoolingTask
    inputs: Sequence[PoolingInput]
    """At least one until they are tokenized. All are pairs, or none is."""
    field: str = "input"
    """The request's field that has the inputs, for errors."""
    before: tuple[str, int] = ("", 0)
    """Another field and how many inputs it has, before those of ``field``: the queries of documents."""
    prompt: str = ""
    """Text before every input, as sentence-transformers' prompts are."""
    add_special_tokens: bool = True
    truncate: int | None = None
    """Maximum tokens of an input, special ones included, to which longer ones are cut; None: longer ones than
    the model takes are refused."""
    truncate_left: bool = False
    """Whether truncation drops tokens at the start of an input."""
    dimensions: int = 0
    """How many values of each vector are wanted; 0: all."""
    normalize: bool = True
    activate: bool = True
    priority: int = 0
    request_id: str | None = None
    fields: Any = None
    """What the dialect needs for the reply."""


class EncodedInputs(NamedTuple):
    """The token ids of a request's inputs."""

    ids: bytes
    """int32 little-endian, input after input."""
    lengths: I32
    """int32[N]: tokens of each."""
    seconds: I32
    """int32[N]: index of the first token of the second text of a pair; 0: it is none."""
    skipped: int = 0
    """Tokens at the start of each input, those of the prompt, that do not count in its vector."""


@dataclass(slots=True)
class PooledInputs:
    """What has been made of a request's inputs, in their order."""

    values: F32
    """float32[rows, W]: one row per input, or with a task per token one per token."""
    lengths: I32
    """int32[N]: tokens of each input."""
    per_token: bool
    usage: TokenUsage

    def __len__(self) -> int:
        return len(self.lengths)

    def of_input(self, index: int) -> F32:
        """float32[W], or with a task per token float32[tokens, W]."""
        if not self.per_token:
            vector: F32 = self.values[index]
            return vector
        start = int(np.add.reduce(self.lengths[:index], dtype=np.int64))
        return self.values[start : start + int(self.lengths[index])]
