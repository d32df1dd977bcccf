"""The parts of a transformers model with image input: a causal LM, and an encoder of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.engine.torch.media.families import SEEING_FAMILIES


class LanguagePart(nn.Module):
    """The text of a transformers model with image input as a causal LM, made of the model's own modules and
    named like one."""

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


class PictureEncoder:
    """The encoder of a loaded model with image input."""

    def __init__(self, whole: Any) -> None:
        self._model = whole
        self.family = SEEING_FAMILIES[whole.config.model_type]
        self.token = int(whole.config.image_token_id)
        """The token in whose places features are."""

    @torch.inference_mode()
    def encode(self, arrays: Mapping[str, NDArray[Any]]) -> Tensor:
        """[F, H]: the features of one picture, in the order of its tokens. ``arrays``: what its processor has
        made of it, by the names of the encoder's arguments.

        Alone, so that they do not depend on pictures that are beside it. Raises whatever the model raises for
        arrays that do not fit.
        """
        output = self._model.get_image_features(
            **{name: self._to_device(name, array) for name, array in arrays.items()}, return_dict=True
        )
        features = output.pooler_output
        parts = [features] if isinstance(features, Tensor) else list(features)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).to(self._model.dtype)

    def _to_device(self, name: str, array: NDArray[Any]) -> Tensor:
        # a copy: PyTorch has no tensors that are only read
        tensor = torch.from_numpy(np.array(array))
        if tensor.is_floating_point():
            tensor = tensor.to(self._model.dtype)
        if name.startswith("pixel_"):
            dimensions = self.family.dimensions - (name != "pixel_values")
            while tensor.ndim < dimensions:
                tensor = tensor[None]
        return tensor.to(self._model.device)
