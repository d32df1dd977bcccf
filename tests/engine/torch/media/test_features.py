"""The features of a step's pictures, and how far their tokens see, against transformers' own mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings

from penstock.engine.batch.slots import SlotTable
from penstock.engine.media.spans import MediaSpans
from penstock.engine.torch.attention_metadata import token_positions
from penstock.engine.torch.media.features import Features
from penstock.wire.media.items import MediaItem
from tests.engine.media.test_rope_positions import IMAGE, Picture, batch_of, make_prompt, pictures
from tests.engine.torch.harness import DEVICE


def features(prompt: np.ndarray[Any, Any], media: list[MediaItem], parts: list[tuple[int, int, int]]) -> Any:
    """Features of a batch whose slot 3 has the prompt, positions int64[T]."""
    table = SlotTable(4, 300, [])
    table.history[3, : len(prompt)] = prompt
    spans = MediaSpans(table, IMAGE)
    spans.begin(3, media)
    batch = batch_of(parts)
    found = spans.in_batch(batch)
    given = Features.of(((each, torch.zeros(each.total, 4)) for each in found), DEVICE)
    return given, token_positions(batch)


@settings(max_examples=100)
@given(pictures)
def test_reach_is_what_the_mask_of_transformers_shows(parts: list[Picture]) -> None:
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    prompt, media = make_prompt(parts, 5)
    size = len(prompt)
    given, positions = features(prompt, media, [(1, 2, 1), (3, 0, size), (2, 0, 3)])
    if not media:
        assert given is None
        return
    reach = given.reach(positions)
    blocks = get_block_sequence_ids_for_mask(torch.from_numpy(prompt == IMAGE).int()[None])[0]
    together = (blocks[:, None] == blocks) & (blocks >= 0)
    visible = (torch.ones(size, size).tril().bool() | together).numpy()
    own = slice(1, 1 + size)
    assert (np.arange(size) <= reach[own, None]).tolist() == visible.tolist()
    assert (np.delete(reach, own) == np.delete(positions, own)).all()


def test_tokens_see_nothing_behind_their_chunk_or_their_run() -> None:
    prompt, media = make_prompt([(2, 3, 2, 0), (1, 2, 2, 1)], 4)
    given, positions = features(prompt, media, [(3, 5, 9)])
    assert given.reach(positions).tolist() == [8, 8, 8, 8, 9, 10, 11, 13, 13]
    prompt = np.array([5, IMAGE, IMAGE, 6, IMAGE, 5, IMAGE], np.int32)
    given, positions = features(prompt, [MediaItem(bytes(16), 1, 5, 0)], [(3, 0, 7)])
    assert given.reach(positions).tolist() == [0, 2, 2, 3, 4, 5, 6]
