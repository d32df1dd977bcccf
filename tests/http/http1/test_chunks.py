from __future__ import annotations

import pytest

from penstock.http.http1.chunks import CHUNK_SIZES, chunk


@pytest.mark.parametrize("size", [1, 15, 16, len(CHUNK_SIZES) - 1])
def test_the_table_of_sizes_frames_as_chunk_does(size: int) -> None:
    data = bytes(size)
    assert CHUNK_SIZES[size] + data + b"\r\n" == chunk(data)
