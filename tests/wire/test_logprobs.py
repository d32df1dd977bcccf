"""Logprobs of token frames: which entries are valid."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.logprobs import Logprobs, are_sound, wrong_candidates

INF = float("inf")


CELLS = st.sampled_from([-INF, INF, np.nan, -0.0, 0.0, -1e-45, -0.5, 1.0, -3e38, 3e38])


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5), st.data())
def test_entries_are_sound_if_none_is_wrong(values: list[tuple[float, float]], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 2))
    count = len(values)
    drawn = [
        data.draw(st.lists(st.sampled_from([-2, -1, 0, 1, 9, 10]), min_size=2, max_size=2)) for _ in values
    ]
    logprobs = Logprobs(
        np.arange(count, dtype=np.int32),
        np.array(drawn, np.int32)[:, :width],
        np.array(values, np.float32)[:, :width],
        np.array(
            data.draw(st.lists(st.sampled_from([0, 1, 3, 1, -1]), min_size=count, max_size=count)), np.int32
        ),
    )
    sound = not wrong_candidates(logprobs, 10).any()
    assert are_sound(logprobs, 10) == sound
    tokens = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), np.int32)
    assert are_sound(logprobs, 10, tokens) == sound
    same = Logprobs(logprobs.token, tokens[:, None], logprobs.values[:, :1], logprobs.rank)
    assert are_sound(same, 10, tokens) == (not wrong_candidates(same, 10).any())
