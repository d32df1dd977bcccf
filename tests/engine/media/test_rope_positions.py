"""Positions of pictures against transformers' own, for both of its families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.media.rope_positions import RopePositions, rope_positions
from penstock.engine.schedule.batch import Batch
from penstock.engine.torch.attention_metadata import token_positions
from penstock.wire.media.items import MediaItem

IMAGE, START, END = 90, 91, 92
MERGE = 2


def rope_index(kind: str, prompt: np.ndarray[Any, Any], grids: list[tuple[int, int, int]]) -> Any:
    """transformers' positions [3, N] and delta, without a model."""
    from types import SimpleNamespace

    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    model: Any = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel}[kind]
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    fake = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    fake.get_vision_position_ids = lambda *arguments, **options: model.get_vision_position_ids(
        fake, *arguments, **options
    )
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    grid = torch.tensor(grids) if grids else None
    positions, delta = model.get_rope_index(fake, ids, (ids == IMAGE).int(), grid)
    return positions[:, 0].numpy(), int(delta[0, 0])


Picture = tuple[int, int, int, int]
"""Text before it, height and width in features, tokens of its marks that its span has."""
pictures = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.integers(0, 1)), max_size=4
)


def make_prompt(parts: list[Picture], behind: int) -> tuple[np.ndarray[Any, Any], list[MediaItem]]:
    tokens: list[int] = []
    media = []
    for number, (before, height, width, marks) in enumerate(parts):
        tokens += [3] * before
        item = MediaItem(
            key=bytes([number]) * 16,
            offset=len(tokens) + 1 - marks,
            length=height * width + 2 * marks,
            size=0,
            grid=(1, height * MERGE, width * MERGE),
        )
        tokens += [START, *[IMAGE] * height * width, END]
        media.append(item)
    return np.array(tokens + [4] * behind, np.int32), media


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
@settings(max_examples=150)
@given(pictures, st.integers(1, 12))
def test_they_are_those_of_transformers(kind: str, parts: list[Picture], behind: int) -> None:
    prompt, media = make_prompt(parts, behind)
    expected, expected_delta = rope_index(kind, prompt, [item.grid for item in media])  # type: ignore[misc]
    found, delta = rope_positions(prompt, media, IMAGE, MERGE)
    assert delta == expected_delta
    text = np.arange(found.shape[1], len(prompt)) + delta
    assert np.concatenate((found, np.repeat(text[None], 3, 0)), 1).tolist() == expected.tolist()


def batch_of(parts: list[tuple[int, int, int]]) -> Batch:
    """(slot, start, count) of each part, in order."""
    slots, start, count = (np.array(column) for column in zip(*parts, strict=True))
    everyone = np.arange(len(parts))
    singles = int((count == 1).sum())
    return Batch(
        slots=slots.astype(np.intp),
        start=start.astype(np.int32),
        count=count.astype(np.int32),
        singles=singles,
        decodes=singles,
        samples=everyone,
        generations=np.zeros(len(parts), np.int64),
    )


@settings(max_examples=60)
@given(pictures, st.integers(1, 12), st.data())
def test_a_step_has_those_of_its_chunks(parts: list[Picture], behind: int, data: st.DataObject) -> None:
    """Chunks cut anywhere, beside text; resumed and sampled tokens follow by the delta."""
    prompt, media = make_prompt(parts, behind)
    whole, delta = rope_positions(prompt, media, IMAGE, MERGE)
    tail = np.arange(whole.shape[1], len(prompt) + 20) + delta
    expected = np.concatenate((whole, np.repeat(tail[None], 3, 0)), 1)
    rope = RopePositions(8, IMAGE, MERGE)
    if media:
        rope.begin(5, prompt, media)
    start = data.draw(st.integers(0, len(prompt) + 10))
    count = data.draw(st.integers(2, 10))
    batch = batch_of([(2, 7, 1), (5, start, count), (3, 0, 4)])
    found = rope.of(batch, token_positions(batch))
    if found is None:
        assert not media or delta == 0
        found = token_positions(batch)
    assert (found.ndim == 1) == (start >= whole.shape[1])
    rows = np.broadcast_to(found, (3, count + 5))
    assert rows[:, 1 : 1 + count].tolist() == expected[:, start : start + count].tolist()
    assert rows[:, [0, *range(1 + count, count + 5)]].tolist() == [[7, 0, 1, 2, 3]] * 3


def test_streams_of_text_have_those_in_their_histories() -> None:
    prompt, media = make_prompt([(2, 3, 2, 0)], 4)
    rope = RopePositions(4, IMAGE, MERGE)
    rope.begin(1, prompt, media)
    text = batch_of([(0, 30, 1), (2, 0, 5)])
    assert rope.of(text, token_positions(text)) is None
    decodes = batch_of([(1, 20, 1), (0, 30, 1)])
    assert rope.of(decodes, token_positions(decodes)).tolist() == [17, 30]  # type: ignore[union-attr]
    rope.end(1)
    rope.end(3)
    assert rope.of(decodes, token_positions(decodes)) is None


def test_a_grid_of_another_picture_is_refused() -> None:
    prompt, (item,) = make_prompt([(2, 3, 2, 0)], 4)
    for grid in ((1, 4, 4), (), (1, 6, 2)):
        wrong = MediaItem(item.key, item.offset, item.length, item.size, grid)
        with pytest.raises(ValueError, match=r"media\[0\]: a grid of .* the prompt has 6 tokens of id 90"):
            rope_positions(prompt, [wrong], IMAGE, MERGE)
    prompt[item.offset + 2] = 4
    with pytest.raises(ValueError, match="the prompt has 5 tokens of id 90"):
        rope_positions(prompt, [item], IMAGE, MERGE)
