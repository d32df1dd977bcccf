"""What requests are checked against: names, limits and sampling defaults of the served model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.messages import Adapter


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of sampling fields that a request leaves out: OpenAI's, unless the model has its own."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens any request may generate; None: what the context leaves."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, as far as requests are concerned."""

    names: tuple[str, ...]
    """Names of the model itself, at least one; replies report the first."""
    max_model_len: int
    """Prompt plus output, in tokens; at least 2."""
    vocab_size: int
    """Rows of the model's output; token ids in requests are below it."""
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    adapters: tuple[Adapter, ...] = ()
    """Whose names a request may use, too; replies report them."""
    transfers_kv: bool = False
    """Whether requests may have kv_transfer_params."""

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, *(adapter.name for adapter in self.adapters))


def sampling_defaults(directory: str | os.PathLike[str]) -> SamplingDefaults:
    """The defaults in ``generation_config.json`` of a model directory; OpenAI's where it has none.

    Raises ValueError naming the file and the field when a value is out of range.
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
