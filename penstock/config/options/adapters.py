"""Options of LoRA adapters."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group

GROUP = "LoRA adapters"


@option_group
class AdapterOptions:
    """Options of LoRA adapters."""

    enable_lora: Annotated[bool, option("Run LoRA adapters: requests name one as their model.", GROUP)] = (
        False
    )
    lora_modules: Annotated[
        list[str] | None,
        option(
            "Adapters that are loaded at the start: NAME=PATH, or a JSON object with name, path and "
            "base_model_name. PATH is a directory in PEFT's format, the same on every host.",
            GROUP,
            metavar="NAME=PATH",
        ),
    ] = None
    lora_dir: Annotated[
        str | None,
        option(
            "Directory of the adapters that requests may load while the server runs. Default: requests may "
            "load none.",
            GROUP,
            metavar="DIR",
        ),
    ] = None
    max_loras: Annotated[
        int, option("Maximum adapters that run in one step of an engine.", GROUP, ge=1, le=1024)
    ] = 4
    max_lora_rank: Annotated[int, option("Maximum rank of an adapter.", GROUP, ge=1, le=1024)] = 16
    max_cpu_loras: Annotated[
        int, option("Maximum adapters that are loaded at a time.", GROUP, ge=1, le=1024)
    ] = 64
