"""Bodies of the routes that load and unload LoRA adapters."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class LoadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter, with vLLM's fields."""

    lora_name: Annotated[str, Meta(description="Name that requests give as their model.")]
    lora_path: Annotated[
        str, Meta(description="Directory in PEFT's format, in --lora-dir: relative to it, or absolute.")
    ]
    load_inplace: Annotated[
        bool,
        Meta(description="Take the place of the adapter that has this name; streams finish with theirs."),
    ] = False


class UnloadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter, with vLLM's fields."""

    lora_name: Annotated[str, Meta(description="Name of the adapter.")]
    lora_int_id: Annotated[int | None, Meta(description="vLLM's number of the adapter; not read.")] = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /admin/adapters."""

    name: Annotated[str, Meta(description="Name that requests give as their model.")]
    path: Annotated[
        str, Meta(description="Directory in PEFT's format, in --lora-dir: relative to it, or absolute.")
    ]
    replace: Annotated[
        bool,
        Meta(description="Take the place of the adapter that has this name; streams finish with theirs."),
    ] = False
