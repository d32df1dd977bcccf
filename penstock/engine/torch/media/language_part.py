"""The text of a transformers model with image input, as a causal LM."""

from __future__ import annotations

from typing import Any

from torch import nn


class LanguagePart(nn.Module):
    """Made of the model's own modules, and named like one."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model = whole.get_decoder()
        self.lm_head = whole.get_output_embeddings()
        self.config = self.model.config

    @property
    def base_model(self) -> Any:
        return self.model

    def get_output_embeddings(self) -> Any:
        return self.lm_head
