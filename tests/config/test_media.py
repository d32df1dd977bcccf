"""Options of pictures."""

from __future__ import annotations

import pytest

from penstock.config.options.media import MAX_IMAGES
from penstock.config.serve import ServeConfig


@pytest.mark.parametrize(
    ("text", "images"),
    [
        (None, MAX_IMAGES),
        ('{"image": 4}', 4),
        ('{"image": {"count": 3, "width": 512}, "video": 0}', 3),
        ('{"video": 1}', MAX_IMAGES),
        ('{"image": 99999}', MAX_IMAGES),
    ],
)
def test_vllms_limits_of_pictures(text: str | None, images: int) -> None:
    assert ServeConfig(limit_mm_per_prompt=text).max_images == images


def test_arguments_of_the_processor() -> None:
    assert ServeConfig(mm_processor_kwargs='{"size": {"height": 1}}').processor_kwargs == {
        "size": {"height": 1}
    }


def test_a_host_that_is_none_ends_the_start() -> None:
    with pytest.raises(ValueError, match=r"--allowed-media-domains 'https://a\.test': it is none of DOMAIN"):
        ServeConfig(allowed_media_domains=["b.test", "https://a.test"])
