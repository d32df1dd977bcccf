"""Every token of a step runs through its adapter, once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.schedule.adapter_room import NO_PLACE
from penstock.engine.torch.lora.lora_plan import LoraPlan, plan_lora

CPU = torch.device("cpu")


def plan_of(places: list[int]) -> LoraPlan | None:
    return plan_lora(np.array(places, np.int32), CPU)


def computed(plan: LoraPlan) -> dict[int, int]:
    """The place that each token is computed with."""
    found: dict[int, int] = {}
    if plan.padded is not None:
        groups = plan.padded.last - plan.padded.first
        width = len(plan.padded.source) // groups
        rows = plan.padded.rows.numpy()
        tokens = plan.padded.tokens.tolist()
        assert len(set(rows.tolist())) == len(rows)
        assert plan.padded.source.numpy()[rows].tolist() == tokens
        for token, row in zip(tokens, rows.tolist(), strict=True):
            assert token not in found
            found[token] = plan.padded.first + row // width
        assert set(plan.padded.places) == set(found.values())
    for single in plan.singles:
        tokens = torch.arange(plan.total)[single.tokens].tolist()
        assert not found.keys() & set(tokens)
        found |= dict.fromkeys(tokens, single.place)
    return found


@given(st.lists(st.tuples(st.integers(NO_PLACE, 6), st.integers(1, 40)), min_size=1, max_size=12))
def test_every_token_is_computed_with_its_adapter(runs: list[tuple[int, int]]) -> None:
    places = [place for place, count in runs for _ in range(count)]
    plan = plan_of(places)
    expected = {token: place for token, place in enumerate(places) if place != NO_PLACE}
    assert (plan is None) == (not expected)
    if plan is not None:
        assert computed(plan) == expected
        assert plan.total == len(places)
        assert plan.places.tolist() == sorted(set(expected.values()))


def test_decodes_of_many_adapters_are_padded_together() -> None:
    plan = plan_of([3, 0, 1, 2, 3, 0, NO_PLACE, 2])
    assert plan is not None
    assert plan.padded is not None
    assert not plan.singles
    assert len(plan.padded.source) == 8


def test_a_chunk_of_a_prompt_is_computed_on_its_own() -> None:
    plan = plan_of([0, 1, 2, 3, *[2] * 500, *[NO_PLACE] * 20])
    assert plan is not None
    assert plan.padded is not None
    assert set(plan.padded.places) == {0, 1, 3}
    (single,) = plan.singles
    assert single.place == 2


@pytest.mark.parametrize("before", [0, 3])
def test_one_adapter_takes_a_range_without_padding(before: int) -> None:
    plan = plan_of([NO_PLACE] * before + [5] * 7)
    assert plan is not None
    assert plan.padded is None
    (single,) = plan.singles
    assert single.tokens == slice(before, before + 7)
