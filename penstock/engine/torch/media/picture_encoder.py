"""The encoder of pictures: from the arrays that a processor has made to what the model computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.serve import ServeConfig
from penstock.engine.batch.slots import SlotTable
from penstock.engine.media.engine_media import EngineMedia
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.torch.media.families import SEEING_FAMILIES
from penstock.engine.torch.media.largest_picture import largest_picture
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.out_of_memory import is_out_of_memory, stating_shortage
from penstock.wire.media.items import MediaItem

if TYPE_CHECKING:
    from penstock.media.pages import Pages

LESS_FEATURES = "lower --encoder-cache-tokens, or end other processes on the device"


class PictureEncoder:
    """Of a model that sees; a :class:`penstock.engine.media.engine_media.MediaEncoder`."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self.family = SEEING_FAMILIES[model.whole.config.model_type]
        self.token = int(model.whole.config.image_token_id)
        """The token in whose places features are."""
        vision = model.whole.config.vision_config
        self.rope_merge = int(vision.spatial_merge_size) if self.family.grid_positions else 0
        """See :class:`penstock.engine.media.engine_media.EngineMedia`."""

    def encode(self, item: MediaItem, pages: Pages) -> Tensor:
        try:
            return self.features(pages.arrays)
        except (TypeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(f"the model cannot take what was prepared of a picture: {error}") from error

    @torch.inference_mode()
    def features(self, arrays: Mapping[str, NDArray[Any]]) -> Tensor:
        """[F, H]: the features of one picture, in the order of its tokens. ``arrays``: what its processor has
        made of it, by the names of the encoder's arguments.

        Pictures are encoded alone, so that their features do not depend on each other.
        """
        output = self._model.whole.get_image_features(
            **{name: self._to_device(name, array) for name, array in arrays.items()}, return_dict=True
        )
        found = output.pooler_output
        parts = [found] if isinstance(found, Tensor) else list(found)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).to(self._model.dtype)

    def _to_device(self, name: str, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.array(array))  # a copy: PyTorch has no tensors that are only read
        if tensor.is_floating_point():
            tensor = tensor.to(self._model.dtype)
        if name.startswith("pixel_"):
            dimensions = self.family.dimensions - (name != "pixel_values")
            tensor = tensor[(None,) * (dimensions - tensor.ndim)]
        return tensor.to(self._model.device)


def make_media(
    model: PagedModel, table: SlotTable, pages: PageSupply | None, config: ServeConfig
) -> EngineMedia | None:
    """The pictures of an engine; None: its model takes text alone."""
    if pages is None or not model.sees:
        return None
    encoder = PictureEncoder(model)
    return EngineMedia(
        table,
        encoder.token,
        encoder,
        pages,
        cache_tokens=config.encoder_cache_tokens,
        step_tokens=config.max_num_batched_tokens,
        whole_spans=encoder.family.whole_spans,
        rope_merge=encoder.rope_merge,
    )


def encode_largest(model: PagedModel, config: ServeConfig) -> None:
    """Encode a picture with as many features as the cache of features holds, or as a processor makes at most.
    Raises ConfigError when there is no memory for it."""
    encoder = PictureEncoder(model)
    arrays = largest_picture(encoder.family, model.whole.config, config.encoder_cache_tokens)
    with stating_shortage("encoding the largest picture", LESS_FEATURES, model.device):
        encoder.features(arrays)


def feature_bytes(model: PagedModel, config: ServeConfig) -> int:
    """Bytes of the cached features, once there are so many."""
    if not model.sees:
        return 0
    return (
        config.encoder_cache_tokens * int(model.whole.get_decoder().config.hidden_size) * model.dtype.itemsize
    )
