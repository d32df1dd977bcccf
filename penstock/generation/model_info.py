"""Properties of the served model that requests are checked against: names, limits, sampling defaults."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.media.worker import MediaDescription


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of sampling fields: OpenAI's, or those of the model's generation_config.json."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum tokens that any request may generate; None: limited by the context only."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the served model."""

    names: tuple[str, ...]
    """Served names of the model, at least one; replies report the first."""
    max_model_len: int
    """Maximum length of prompt plus output in tokens; at least 2."""
    vocab_size: int
    """Output rows of the model; token ids in requests must be below it."""
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    model_type: str = ""
    """As in config.json; empty: unknown."""
    media: MediaDescription | None = None
    """How pictures are put into prompts; None: the model takes none."""
    picture_tokens: Callable[[], int] = int
    """How many tokens a picture has that is not prepared yet, about; 0: nobody knows."""
    transfers_kv: bool = False
    """Whether kv_transfer_params are supported."""
    tasks: tuple[str, ...] = ()
    """What it makes, of a model that makes vectors, scores or labels: generate (text), embed, classify …"""

    @property
    def takes_images(self) -> bool:
        """Whether it takes pictures in conversations."""
        return self.media is not None

    @property
    def generates(self) -> bool:
        """Whether it serves text."""
        return not self.tasks or "generate" in self.tasks


def model_type(directory: str | os.PathLike[str]) -> str:
    """``model_type`` in ``config.json`` of a model directory; empty if there is none."""
    try:
        found = msgspec.json.decode((Path(directory) / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    named = found.get("model_type")
    return named if isinstance(named, str) else ""


def sampling_defaults(directory: str | os.PathLike[str]) -> SamplingDefaults:
    """Defaults from ``generation_config.json`` in a model directory, otherwise OpenAI's.

    Raises ValueError naming the file and the field if a value is out of range.
    """
    path = Path(directory) / "generation_config.json"
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        known = {
            name: fields[name] for name in SamplingDefaults.__struct_fields__ if fields.get(name) is not None
        }
        return msgspec.convert(known, SamplingDefaults)
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
