"""A picture that takes as much memory to encode as any: its values mean nothing."""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.torch.media.families import SeeingFamily

MOST_TILES = 16
"""Of a picture, by the processors of Idefics 3 and SmolVLM, beside the whole."""


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
    size, tiles = int(vision.image_size), 1
    arrays: dict[str, NDArray[Any]] = {}
    if sizes := getattr(config, "image_grid_pinpoints", None):
        arrays["image_sizes"] = np.array([max(sizes, key=prod)])
        tiles += int((arrays["image_sizes"] // size).prod())
    elif family.dimensions == 5:
        tiles += MOST_TILES
    shape = (1, tiles, 3, size, size) if family.dimensions == 5 else (1, 3, size, size)
    return arrays | {"pixel_values": np.ones(shape, np.float32)}
