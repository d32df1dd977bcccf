"""Token frames: their bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import FinishReason, TokenFrame, decode_frame, encode_frame
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import (
    FrameHeader,
    WireError,
    encode,
)
from penstock.wire.regroup import merge_frames
from tests.wire.frames_support import consecutive_frames, decode, load_of, rows_of, tolerant_rows


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def plain(stream: Any, position: Any, tokens: Any, logprobs: Logprobs | None = None) -> TokenFrame:
    """A frame of rows with one token each."""
    return TokenFrame(step=1, stream=stream, position=position, tokens=tokens, logprobs=logprobs)


FULL = TokenFrame(
    step=7,
    stream=i32(3, 1),
    position=i32(0, 5),
    tokens=i32(10, 11, 12),
    count=i32(2, 1),
    finish=np.array([0, FinishReason.LENGTH], np.int8),
    cached=i32(16, 0),
    logprobs=Logprobs(i32(1), i32(11, -1)[None], np.array([[-0.5, -np.inf]], np.float32), i32(1)),
    waiting=1,
    running=2,
    kv_used=0.25,
    weights=3,
)


def test_golden_bytes_of_a_plain_frame() -> None:
    header, body = encode_frame(plain(i32(0, 2), i32(4, 9), i32(256, 7)))
    assert header.hex() == "991101960002010203020000cb000000000000000000c000"
    assert body.hex() == "000000000200000004000000090000000001000007000000"


def test_golden_bytes_of_all_columns() -> None:
    header, body = encode_frame(FULL)
    assert header.hex() == "991107dc001400020102020203030502060107020802090104020102cb3fd000000000000000c003"
    assert body.hex() == (
        "0300000001000000"  # stream
        "0000000005000000"  # position
        "0200000001000000"  # count
        "0a0000000b0000000c000000"  # tokens
        "1000000000000000"  # cached
        "01000000"  # lp_token
        "0b000000ffffffff"  # lp_ids
        "000000bf000080ff"  # lp_values
        "01000000"  # lp_rank
        "0002"  # finish
    )
    assert rows_of(decode([header, body])) == rows_of(FULL)


@pytest.mark.parametrize(
    ("ids", "columns"),
    [(i32(10, 11)[:, None], [8, 2, 9, 2]), (i32(10, 5, 11, 6).reshape(2, 2), [7, 4, 8, 4, 9, 2])],
    ids=["own tokens alone", "others as well"],
)
def test_what_tokens_say_of_their_logprobs_is_not_sent(ids: Any, columns: list[int]) -> None:
    scored = Logprobs(i32(0, 1), ids, np.full(ids.shape, -0.5, np.float32), i32(1, 3))
    frame = plain(i32(3, 1), i32(0, 5), i32(10, 11), scored)
    header, body = encode_frame(frame)
    decoded = decode_from_engine(header)
    assert isinstance(decoded, FrameHeader)
    assert list(decoded.columns) == [0, 2, 1, 2, 3, 2, *columns]
    assert rows_of(decode([header, body])) == rows_of(frame)


@given(consecutive_frames())
def test_round_trip(frames: list[TokenFrame]) -> None:
    for frame in frames:
        decoded = decode(encode_frame(frame))
        assert rows_of(decoded) == rows_of(frame)
        assert load_of(decoded) == load_of(frame)


def test_columns_of_another_type_are_sent_as_the_wire_has_them() -> None:
    frame = plain(np.array([1], np.int64), np.array([2], ">i4"), np.array([3], np.uint16))
    assert rows_of(decode(encode_frame(frame))) == rows_of(plain(i32(1), i32(2), i32(3)))


def test_decoded_columns_are_read_only() -> None:
    frame = decode(encode_frame(FULL))
    with pytest.raises(ValueError, match="read-only"):
        frame.tokens[0] = 1


# -- what is refused


@pytest.mark.parametrize(
    ("columns", "body", "reason"),
    [
        ([0], b"", "not .id, length. pairs"),
        ([99, 0, 0, 0, 1, 0, 3, 0], b"", "unknown column 99"),
        ([0, 0, 0, 0, 1, 0, 3, 0], b"", "STREAM is doubled"),
        ([0, 1, 1, 1, 3, 1], bytes(8), "TOKENS is cut short"),
        ([0, 1 << 30, 1, 1, 3, 1], bytes(12), "1073741824 rows, but 1 values of position"),
        ([0, 1, 1, 1, 3, 1], bytes(13), "1 bytes after"),
        ([0, 1, 1, 1], bytes(8), "no column TOKENS"),
        ([1, 0, 3, 0], b"", "no column STREAM"),
        ([0, 1, 1, 0, 3, 1], bytes(8), "1 rows, but 0 values of position"),
        ([0, 1, 1, 1, 3, 2], bytes(16), "1 rows of one token, but 2 tokens"),
        ([0, 1, 1, 1, 2, 1, 3, 1], bytes(16), "count does not add up"),
        ([0, 2, 1, 2, 2, 2, 3, 0], bytes(16) + b"\xff\xff\xff\xff\1\0\0\0", "count does not add up"),
        ([0, 1, 1, 1, 3, 1], b"\xff\xff\xff\xff" + bytes(8), "negative stream"),
        ([0, 1, 1, 1, 3, 1], bytes(4) + b"\xff\xff\xff\xff" + bytes(4), "negative stream or position"),
        ([0, 1, 1, 1, 3, 1], bytes(8) + b"\xff\xff\xff\xff", "negative token"),
        ([0, 1, 1, 1, 3, 1, 5, 1], bytes(12) + b"\0\0\0\x80", "negative number of cached"),
        ([0, 1, 1, 1, 3, 1, 4, 1, 5, 1], bytes(13) + b"\0\0\0\x80", "negative number of cached"),
        ([0, 1, 1, 1, 3, 1, 4, 1], bytes(12) + b"\x06", "unknown finish"),
        ([0, 1, 1, 1, 3, 1, 4, 1], bytes(12) + b"\xff", "unknown finish"),
        ([0, 1, 1, 1, 3, 1, 4, 0], bytes(12), "0 values of finish"),
        ([0, 1, 1, 1, 3, 1, 5, 2], bytes(20), "2 values of cached"),
        ([0, 1, 1, 1, 3, 1, 6, 1], bytes(16), "together"),
        ([0, 1, 1, 1, 3, 1, 6, 1, 7, 1, 8, 2, 9, 1], bytes(32), "disagree"),
        ([0, 1, 1, 1, 3, 1, 10, 1], bytes(16), "together"),
        ([0, 1, 1, 1, 3, 1, 10, 1, 11, 2, 12, 1, 13, 1, 14, 1], bytes(36), "disagree"),
        ([0, 1, 1, 1, 3, 1, 10, 1, 11, 1, 12, 1, 13, 2, 14, 1], bytes(36), "disagree"),
        ([0, 1, 1, 1, 3, 1, 10, 1, 11, 1, 12, 1, 13, 1, 14, 1], bytes(12) + b"\1" + bytes(19), "a row that"),
        ([0, 1, 1, 1, 3, 1, 6, 0, 7, 0, 8, 0, 9, 0], bytes(12), "disagree"),
        ([0, 1, 1, 1, 3, 1, 6, 1, 7, 1, 8, 1, 9, 1], bytes(12) + b"\1" + bytes(15), "not there"),
    ],
)
def test_refused(columns: list[int], body: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_frame(FrameHeader(1, columns), body)


def test_logprob_entries_must_ascend() -> None:
    entries = Logprobs(i32(1, 0), i32(1, 2)[:, None], np.zeros((2, 1), np.float32), i32(1, 1))
    frame = plain(i32(1, 2), i32(0, 0), i32(5, 6), entries)
    with pytest.raises(WireError, match="ascending"):
        decode(encode_frame(frame))


def test_a_frame_without_rows_is_taken() -> None:
    frame = decode(encode_frame(plain(i32(), i32(), i32())))
    assert frame.rows == 0


PAIRS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 3) | st.integers(0, (1 << 31) - 1)), max_size=11
)


@given(PAIRS.map(lambda pairs: [number for pair in pairs for number in pair]), st.binary(max_size=64))
def test_any_header_and_body_are_a_frame_or_a_wire_error(columns: list[int], body: bytes) -> None:
    check_frame_or_error(FrameHeader(1, columns), body)


@given(st.data())
def test_a_changed_frame_is_a_frame_or_a_wire_error(data: st.DataObject) -> None:
    frame = data.draw(st.sampled_from(data.draw(consecutive_frames())))
    raw_header, body = encode_frame(frame)
    header = decode_from_engine(raw_header)
    assert isinstance(header, FrameHeader)
    columns, changed = list(header.columns), bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["column", "byte", "cut", "more"])):
            case "column":
                columns[data.draw(st.integers(0, len(columns) - 1))] = data.draw(st.integers(0, 12))
            case "byte" if changed:
                changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
            case "cut":
                del changed[data.draw(st.integers(0, len(changed))) :]
            case _:
                changed += data.draw(st.binary(max_size=8))
    check_frame_or_error(FrameHeader(1, columns), bytes(changed))


def check_frame_or_error(header: FrameHeader, body: bytes) -> None:
    try:
        frame = decode_frame(header, body)
    except WireError:
        return
    again = decode([encode(header), body])
    assert tolerant_rows(again) == tolerant_rows(frame)
    assert tolerant_rows(merge_frames([frame, again])) is not None
