"""Other weights for a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def changed(directory: Path, other: Path) -> transformers.PreTrainedModel:
    """The model of ``directory`` with other random weights, saved to ``other``."""
    (name,) = transformers.AutoConfig.from_pretrained(directory).architectures
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.neg_()
    model.save_pretrained(other)
    return model
