"""Frames merged by stream, and some of their rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import TokenFrame, encode_frame
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import WireError
from penstock.wire.regroup import NOT_CONSECUTIVE, join_rows, merge_frames, take_rows
from tests.wire.frames_support import (
    StreamPart,
    by_stream,
    consecutive_frames,
    decode,
    frame_of,
    load_of,
    rows_of,
)


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


@given(consecutive_frames(min_size=2), st.data())
def test_rows_that_do_not_follow_each_other_are_marked(frames: list[TokenFrame], data: st.DataObject) -> None:
    """A gap, a repetition, or a row after the end; whatever is merged first."""
    twice = [stream for stream in by_stream(frames) if sum(stream in frame.stream for frame in frames) > 1]
    if not twice:
        return
    wrong = data.draw(st.sampled_from(twice))
    later = [frame for frame in frames if wrong in frame.stream][1:]
    frame = data.draw(st.sampled_from(later))
    row = int(np.flatnonzero(frame.stream == wrong)[0])
    if data.draw(st.booleans()):
        frame.position = frame.position.copy()
        frame.position[row] += data.draw(st.sampled_from([-1, 1, 7]))
    else:
        first = next(frame for frame in frames if wrong in frame.stream)
        first.finish = np.zeros(first.rows, np.int8) if first.finish is None else first.finish.copy()
        first.finish[first.stream == wrong] = 1
    half = data.draw(st.integers(0, len(frames)))
    parts = [merge_frames(part) for part in (frames[:half], frames[half:]) if part]
    for merged in (merge_frames(frames), merge_frames(parts)):
        marked = merged.stream[merged.position == NOT_CONSECUTIVE].tolist()
        assert marked == [wrong]
        assert rows_of(decode(encode_frame(merged)))


def test_frames_of_different_weights_are_not_merged() -> None:
    frames = [
        frame_of(step, [(1, StreamPart(step, [7], logprobs=[None]))], optional=False, weights=step)
        for step in range(2)
    ]
    with pytest.raises(WireError, match="other weights"):
        merge_frames(frames)
    merged = merge_frames(
        [frames[1], frame_of(2, [(1, StreamPart(2, [8], logprobs=[None]))], optional=False, weights=1)]
    )
    assert (merged.weights, merged.tokens.tolist()) == (1, [7, 8])


def test_rows_of_one_frame_are_joined() -> None:
    frame = TokenFrame(
        step=1,
        stream=np.array([7, 3, 7, 3], np.int32),
        position=np.array([0, 5, 2, 5], np.int32),
        tokens=np.array([1, 2, 9, 3, 9], np.int32),
        count=np.array([2, 1, 1, 1], np.int32),
    )
    joined = join_rows([frame])
    assert joined.stream.tolist() == [3, 7]
    assert joined.position.tolist() == [NOT_CONSECUTIVE, 0]
    assert joined.tokens.tolist() == [9, 9, 1, 2, 3]


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


def test_entries_of_one_token_stay_together() -> None:
    """A token with very many candidates has several entries, which merging and dividing keep in order."""
    ids = np.arange(300, dtype=np.int32)[None] + 1000 * np.arange(2, dtype=np.int32)[:, None]
    wide = Logprobs(np.arange(2, dtype=np.int32), ids, -ids.astype(np.float32), np.ones(2, np.int32)).split()
    frames = [
        TokenFrame(
            step=step,
            stream=np.array([7, 3], np.int32),
            position=np.array([step, step], np.int32),
            tokens=np.array([70, 30], np.int32),
            logprobs=wide,
        )
        for step in range(2)
    ]
    merged = decode(encode_frame(merge_frames(frames)))
    assert merged.tokens.tolist() == [30, 30, 70, 70]
    assert merged.logprobs is not None
    for token, first in enumerate((1000, 1000, 0, 0)):
        own = merged.logprobs.ids[merged.logprobs.token == token]
        assert own[own >= 0].tolist() == list(range(first, first + 300))
