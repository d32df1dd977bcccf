"""Files of our writer, read by the format's own reader."""

from __future__ import annotations

import json

import numpy as np
import pytest

from penstock.generation.replies.safetensors_writer import PIECE_BYTES, safetensors_file, tensor_of

reader = pytest.importorskip("safetensors.numpy")


def test_the_formats_reader_reads_every_tensor() -> None:
    long, wide = np.arange(3), np.arange(12, dtype=np.float32).reshape(4, 3)
    tensors = [
        tensor_of("offsets", [long.astype(np.int64)]),
        tensor_of("ids", [np.array([7], np.int32), np.zeros(0, np.int32), np.array([8, 9], np.int32)]),
        tensor_of("wide", [wide[:1], wide[1:]]),
        tensor_of("empty", [np.zeros((0, 5), np.float32)]),
    ]
    file = safetensors_file(tensors, {"id": '"r"'})
    whole = file.whole()
    assert len(whole) == file.size
    found = reader.load(whole)
    assert list(found["offsets"]) == [0, 1, 2]
    assert found["offsets"].dtype == np.int64
    assert list(found["ids"]) == [7, 8, 9]
    assert found["ids"].dtype == np.int32
    np.testing.assert_array_equal(found["wide"], wide)
    assert found["empty"].shape == (0, 5)
    size = int.from_bytes(whole[:8], "little")
    assert size % 8 == 0, "tensors are aligned"
    assert json.loads(whole[8 : 8 + size])["__metadata__"] == {"id": '"r"'}


def test_a_file_without_tensors_is_one() -> None:
    assert reader.load(safetensors_file((), {}).whole()) == {}


def test_parts_of_views_and_large_ones_come_in_pieces() -> None:
    column = np.arange(3 * PIECE_BYTES, dtype=np.float32).reshape(-1, 6)[:, 1:]
    file = safetensors_file([tensor_of("part", [column])], {})
    pieces = list(file.pieces())
    assert min(map(len, pieces[:-1])) >= PIECE_BYTES
    assert max(map(len, pieces)) < 2 * PIECE_BYTES
    np.testing.assert_array_equal(reader.load(b"".join(pieces))["part"], column)
