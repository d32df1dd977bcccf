"""Features of pictures, as transformers makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config.serve import ServeConfig
from penstock.engine.torch.media.families import SEEING_FAMILIES
from penstock.engine.torch.media.picture_encoder import PictureEncoder
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from tests.engine.torch.harness import DEVICE, IMAGE, SMALL_ENGINE, make_model
from tests.engine.torch.media.pictures import FAMILIES, picture, together


def paged(directory: Path) -> PagedModel:
    config = ServeConfig(**SMALL_ENGINE)
    shape = read_shape(str(directory))
    return PagedModel(str(directory), config, shape, dtype=torch.float32, device=DEVICE, head="seeing")


def test_each_family_that_sees_is_tested() -> None:
    assert FAMILIES.keys() == SEEING_FAMILIES.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_features_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, tmp_path)
    encoder = PictureEncoder(paged(tmp_path))
    assert encoder.token == IMAGE
    for number in range(2):
        given = picture(kind, number)
        with torch.inference_mode():
            parts = model.get_image_features(**together([given]), return_dict=True).pooler_output
        features = encoder.features(given.arrays)
        assert len(features) == given.ids.count(IMAGE)
        torch.testing.assert_close(features, torch.cat([part.reshape(-1, 32) for part in parts]))
        writable = given.arrays["pixel_values"].copy()
        one = writable if writable.ndim == 2 else writable[0]  # patches have no dimension of pictures
        assert torch.equal(encoder.features({**given.arrays, "pixel_values": one}), features)
