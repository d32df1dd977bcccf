"""Frames of vectors, and the submits that ask for them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.wire.decoding import decode_from_engine, decode_from_server
from penstock.wire.frames import TokenFrame, decode_frame, encode_frame
from penstock.wire.messages import (
    FrameHeader,
    InvalidSubmit,
    SamplingParams,
    Submit,
    WireError,
    encode,
)
from penstock.wire.pooling import PoolingParams, PoolingTask
from penstock.wire.regroup import take_rows
from penstock.wire.vectors import Vectors


def vector_frame() -> TokenFrame:
    """Two inputs of one vector of 3 values, an end without any, and one input with two vectors of 2."""
    return TokenFrame(
        step=1,
        stream=np.array([5, 6, 7], np.int32),
        position=np.array([0, 4, 2], np.int32),
        tokens=np.array([1, 1, 2], np.int32),
        count=np.array([2, 0, 1], np.int32),
        finish=np.array([0, 4, 1], np.int8),
        vectors=Vectors(np.array([3, 0, 2], np.int32), np.arange(10, dtype=np.float32)),
    )


def decoded(frame: TokenFrame) -> TokenFrame:
    header, body = encode_frame(frame)
    message = decode_from_engine(header)
    assert isinstance(message, FrameHeader)
    return decode_frame(message, body)


def test_a_frame_of_vectors_is_read_as_it_was_written() -> None:
    frame = decoded(vector_frame())
    assert frame.vectors is not None
    assert frame.vectors.width.tolist() == [3, 0, 2]
    assert frame.vectors.values.tolist() == list(range(10))
    assert frame.vectors.sizes(frame.tokens, frame.counts()).tolist() == [6, 0, 4]


def test_rows_are_taken_with_their_vectors() -> None:
    taken = take_rows(decoded(vector_frame()), np.array([2, 0]))
    assert taken.vectors is not None
    assert taken.vectors.width.tolist() == [2, 3]
    assert taken.vectors.values.tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]
    assert take_rows(vector_frame(), np.array([1])).vectors is not None


@pytest.mark.parametrize(
    ("width", "values", "reason"),
    [
        ([3, 0, 2], 9, "width does not fit"),
        ([3, 0, -2], 10, "negative width"),
        ([3, 0], 10, "2 values of vec_width"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(width: list[int], values: int, reason: str) -> None:
    frame = vector_frame()
    frame.vectors = Vectors(np.array(width, np.int32), np.zeros(values, np.float32))
    with pytest.raises(WireError, match=reason):
        decoded(frame)


def test_vectors_without_their_width_are_refused() -> None:
    header, body = encode_frame(vector_frame())
    message = decode_from_engine(header)
    assert isinstance(message, FrameHeader)
    pairs = list(zip(message.columns[::2], message.columns[1::2], strict=True))
    left = [number for pair in pairs if pair[0] != 15 for number in pair]
    with pytest.raises(WireError, match="together"):
        decode_frame(msgspec.structs.replace(message, columns=left), body[:48] + body[60:])


def submit(lengths: list[int], prompt: int, seconds: list[int] | None = None, most: int = 2) -> Submit:
    params = PoolingParams(
        task=PoolingTask.CLASSIFY,
        lengths=np.array(lengths, "<i4").tobytes(),
        seconds=np.array(seconds or [], "<i4").tobytes(),
    )
    return Submit(3, bytes(prompt), SamplingParams(max_tokens=most, seed=0), pooling=params)


def test_a_submit_of_inputs_is_read_as_it_was_written() -> None:
    sent = submit([3, 4], 28, [2, 0])
    assert decode_from_server(encode(sent)) == sent


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (submit([3, 4], 24), "do not add up"),
        (submit([3, 4, 5], 48), "4 for each of 2 inputs"),
        (submit([3, 0], 12), "do not add up"),
        (submit([3, 4], 28, [1]), "seconds has 4 bytes"),
        (submit([3, 4], 28, [1, 4]), "seconds is not within"),
        (submit([], 0, most=0), "lengths"),
    ],
)
def test_inputs_that_do_not_fit_their_prompt_fail_alone(wrong: Submit, reason: str) -> None:
    with pytest.raises(InvalidSubmit, match=reason) as error:
        decode_from_server(encode(wrong))
    assert error.value.streams == [(3, 0)]
