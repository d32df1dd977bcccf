"""Adapters of tiny models: made by PEFT, and loaded into an engine without the engine process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from penstock.adapters.adapter_files import describe_adapter
from penstock.engine.torch.engine import TorchEngine
from penstock.wire.messages import Adapter, Submit
from tests.engine.torch.harness import submit


def train(
    model: transformers.PreTrainedModel, directory: Path, *, seed: int = 1, scale: float = 0.3, **config: Any
) -> Any:
    """A PEFT model with an adapter of random weights, which is saved to ``directory``. ``model`` must not be
    used any more; ``config``: of PEFT's LoraConfig."""
    import peft

    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "lora_dropout": 0.1}
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # PEFT reads an old attribute
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**(options | config)))
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=scale)
    wrapped.save_pretrained(str(directory))
    return wrapped.eval()


def load(engine: TorchEngine, paths: Mapping[str, Path]) -> None:
    """Load adapters by name, besides those that are loaded; they and no others are current."""
    table = engine.adapters
    assert table is not None
    adapters = []
    for name, path in paths.items():
        adapter = Adapter(name, str(path), digest=describe_adapter(str(path)).digest)
        adapters.append(adapter)
        if (name, adapter.digest) not in table:
            table.add_adapter(adapter, table.loader.read_weights(adapter))
    table.make_current(adapters)


def submit_to(adapter: str | None, stream: int, prompt: Sequence[int], **options: Any) -> Submit:
    """A request of an adapter; None: of the base model."""
    return msgspec.structs.replace(submit(stream, prompt, **options), adapter=adapter)
