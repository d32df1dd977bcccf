"""The desired weights, as API servers, engines and the supervisor exchange them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DEFAULT_VERSION = "default"
"""Version of the weights that a model is started with."""
MAX_SOURCES = 16
"""Sources of one value: each is read again by an engine that restarts."""

TRANSFER = "transfer:"
"""How the path of a source begins that is no file: a trainer sends the tensors to the engines, once."""

WeightVersion = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[ -~]*$")]
StreamsMode = Literal["keep", "wait", "abort"]
CacheMode = Literal["drop", "keep"]


class WeightSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where tensors are."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Absolute path of a directory with safetensors files, or of one such file; the same on every host. Or
    :data:`TRANSFER` and a name."""
    tensors: list[str] | None = None
    """Their names; None: all that are there."""
    part: bool = False
    """Whether they are added to the weights before, as named tensors always are; otherwise this source, with
    those beside it that are no parts, has a whole model."""
    digest: str = ""
    """Of its files (:mod:`penstock.engine.weights.weight_file`); empty: they may be any."""

    @property
    def is_part(self) -> bool:
        """Whether the tensors are added to the weights before."""
        return self.part or self.tensors is not None


class DesiredWeights(msgspec.Struct, frozen=True):
    """The state's value."""

    version: WeightVersion = DEFAULT_VERSION
    sources: list[WeightSource] = []
    """In this order on the weights that the model is started with; later ones replace earlier ones."""
    streams: StreamsMode = "keep"
    """What becomes of streams that run: they go on with the new weights, finish first, or end."""
    cache: CacheMode = "drop"
    """Whether what is cached, computed with other weights, is used any longer."""
    hold: bool = False
    """Only prepare, and compute nothing: engines in lock-step switch between the same two steps."""


class WeightsStatus(msgspec.Struct, frozen=True):
    """What an engine computes with."""

    version: str = DEFAULT_VERSION
    generation: int = 0
    checksum: str | None = None
    loaded: int = 0
    """Tensors that were replaced."""
