"""A picture that takes as much memory to encode as any: its values mean nothing."""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.torch.media.families import SeeingFamily

MOST_TILES = 17
"""Tiles of a picture by the processors of Idefics 3 and SmolVLM: four by four, and the whole."""


def largest_picture(family: SeeingFamily, config: Any, most: int) -> dict[str, NDArray[Any]]:
    """The arrays of a picture with up to ``most`` features, as its processor makes them. ``config``:
    transformers', of the whole model."""
    vision = config.vision_config
    if family.dimensions == 2:  # patches, as many as there is room for
        side = isqrt(most) * vision.spatial_merge_size
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": np.ones((side * side, values), np.float32),
            "image_grid_thw": np.array([[1, side, side]]),
        }
    tiles = (1,) if family.dimensions == 4 else (1, MOST_TILES)
    return {"pixel_values": np.ones((*tiles, 3, vision.image_size, vision.image_size), np.float32)}
