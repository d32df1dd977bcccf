"""Frames merged by stream, and some of their rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import TokenFrame, encode_frame
from penstock.wire.regroup import merge_frames, take_rows
from tests.wire.frames_support import by_stream, consecutive_frames, decode, load_of, rows_of


@given(consecutive_frames())
def test_merge_is_the_streams_joined(frames: list[TokenFrame]) -> None:
    expected = by_stream(frames)
    merged = merge_frames(frames)
    rows = rows_of(merged)
    assert dict(rows) == expected
    assert len(rows) == len(expected)
    if len(frames) > 1:
        assert [stream for stream, _ in rows] == sorted(expected)
    assert load_of(merged) == load_of(frames[-1])


@given(consecutive_frames(min_size=2))
def test_merging_in_two_parts_is_merging_once(frames: list[TokenFrame]) -> None:
    half = len(frames) // 2
    assert rows_of(merge_frames([merge_frames(frames[:half]), merge_frames(frames[half:])])) == rows_of(
        merge_frames(frames)
    )


@given(consecutive_frames())
def test_a_merged_frame_can_be_sent(frames: list[TokenFrame]) -> None:
    merged = merge_frames(frames)
    assert rows_of(decode(encode_frame(merged))) == rows_of(merged)


@given(st.data())
def test_take_rows(data: st.DataObject) -> None:
    frame = data.draw(st.sampled_from(data.draw(consecutive_frames())))
    order = data.draw(st.permutations(range(frame.rows)))
    kept = np.array(order[: data.draw(st.integers(0, frame.rows))], np.intp)
    taken = take_rows(frame, kept)
    rows = rows_of(frame)
    assert rows_of(taken) == [rows[row] for row in kept]
    assert load_of(taken) == load_of(frame)
    assert taken.finish is None or taken.finish.any()
