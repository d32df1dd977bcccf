"""Hosts without API servers, whose engines get pages from those of other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.media import media_of
from penstock.supervisor.startup.model_resolution import ResolvedModel

DEMO = str(Path(penstock.__file__).parent / "demo")


@pytest.mark.parametrize(
    ("options", "has_store"),
    [
        ({"synthetic_image_tokens": 64}, True),
        ({"synthetic_image_tokens": 64, "media_workers": 0}, False),
        ({}, False),
    ],
)
def test_they_have_a_store_and_no_workers(options: dict[str, int], has_store: bool) -> None:
    config = ServeConfig(engine="synthetic", media_cache=1 << 20, **options)  # type: ignore[arg-type]
    with media_of(config, ResolvedModel(DEMO, DEMO, ["m"]), 0) as media:
        assert (media.directory is not None, media.workers) == (has_store, 0)
        assert media.capacity == has_store << 20
