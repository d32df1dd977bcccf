"""Arrays in vLLM's messages: shapes are those of the data, and nothing is unpickled."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import Ext

from penstock.engine.attach.arrays import UnreadableArray, read_array, read_logprobs

MESSAGE = memoryview(b"message")


class Bomb:
    """Ends the process when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def inline(values: Any, dtype: str, name: str | None = None) -> list[Any]:
    made = np.array(values, dtype)
    return [name or made.dtype.str, list(made.shape), Ext(3, made.tobytes())]


def test_inline_and_in_a_frame_of_its_own() -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    assert np.array_equal(read_array(inline(values, "<f4"), [MESSAGE]), values)
    frames = [MESSAGE, memoryview(b"other"), memoryview(values.tobytes())]
    assert np.array_equal(read_array(["float32", [2, 3], 2], frames), values)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        ["<f4", [1]],
        ["<f4", [1], 0],
        ["<f4", [1], 1],
        ["<f4", [1], -1],
        ["<f4", [1], True],
        ["<f4", [2], Ext(3, b"1234")],
        ["<f4", [-1], Ext(3, b"1234")],
        ["<f4", [1 << 62, 4], Ext(3, b"")],
        ["<f4", "1", Ext(3, b"1234")],
        ["<f4", [1, 1, 1, 1], Ext(3, b"1234")],
        ["|O", [1], Ext(3, b"12345678")],
        ["|V8", [1], Ext(3, b"12345678")],
        ["bfloat16", [2], Ext(3, b"123")],
        ["float8_e4m3fn", [4], Ext(3, b"1234")],
        [["<f4"], [1], Ext(3, b"1234")],
        ["<f4", [1], Ext(1, pickle.dumps(Bomb()))],
        ["<f4", [1], Ext(2, pickle.dumps(Bomb()))],
        Ext(1, pickle.dumps(Bomb())),
        Ext(2, pickle.dumps(Bomb())),
    ],
)
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(UnreadableArray):
        read_array(value, [MESSAGE])


def test_logprobs_of_unlike_shapes_are_refused() -> None:
    ids, values, rank = inline([[1, 2]], "<i4"), inline([[0, 0]], "<f4"), inline([1], "<i4")
    read_logprobs([ids, values, rank], [MESSAGE])
    for wrong in (
        [ids, values],
        [ids, values, inline([1, 2], "<i4")],
        [ids, inline([[0]], "<f4"), rank],
        [inline([1, 2], "<i4"), inline([0, 0], "<f4"), rank],
        [inline([[]], "<i4"), inline([[]], "<f4"), rank],
        None,
        "abc",
    ):
        with pytest.raises(UnreadableArray):
            read_logprobs(wrong, [MESSAGE])
