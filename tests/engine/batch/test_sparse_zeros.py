"""Wide tables of which little is used."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.sparse_zeros import sparse_zeros
from penstock.engine.schedule.block_tables import BlockTables


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_it_is_an_array_of_zeros() -> None:
    for shape in ((2,), (3, 5), (100, 1000, 2)):
        array = sparse_zeros(shape, np.int32)
        assert (array.shape, array.dtype) == (shape, np.int32)
        assert not array.any()
        array[-1] = 7
        assert array.reshape(-1)[-1] == 7


def overcommits() -> bool:
    mode = Path("/proc/sys/vm/overcommit_memory")
    return mode.exists() and mode.read_text().strip() != "2"


@pytest.mark.skipif(not overcommits(), reason="memory is reserved for all that is mapped")
def test_a_table_may_be_larger_than_memory() -> None:
    table = sparse_zeros((1 << 10, 1 << 30), np.int32)
    table[:, 5] = 1
    assert int(table[:, 5].sum()) == 1 << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_streams_that_begin_commit_little_memory_of_a_long_context() -> None:
    """With huge pages it would be 2 MiB for each: 512 MiB."""
    before = resident_bytes()
    table = SlotTable(256, 1_000_000, [])
    blocks = BlockTables(256, 1000, 16, 1_000_000)
    table.history[:, 0] = 1
    blocks.table[:, 0] = 1
    assert resident_bytes() - before < 32 << 20
