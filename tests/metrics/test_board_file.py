"""Metrics that are kept over the end of the processes that have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.metrics import families as f
from penstock.metrics.board import KEPT_STARTS, MetricsBoard
from penstock.metrics.board_file import BoardFile
from penstock.metrics.snapshot import Series, Snapshot, encode_snapshot


def board_of(starts: int) -> MetricsBoard:
    """An engine's steps, ten in each start."""
    board = MetricsBoard()
    for epoch in range(starts):
        snapshot = Snapshot("engine 0", epoch, 1, [Series(f.STEPS.name, ("m", "0"), 10)], 7)
        assert board.add_snapshot(snapshot, encode_snapshot(snapshot))
    return board


def steps(board: MetricsBoard) -> object:
    return board.totals().get(f.STEPS.name, {}).get(("m", "0"))


@pytest.mark.parametrize("starts", [1, KEPT_STARTS, KEPT_STARTS + 3])
def test_a_board_is_restored(tmp_path: Path, starts: int) -> None:
    BoardFile(str(tmp_path), 7).save(board_of(starts))
    restored = MetricsBoard()
    for _ in range(2):
        BoardFile(str(tmp_path), 7).load(restored)
        assert steps(restored) == 10 * starts


def test_another_run_has_another_file(tmp_path: Path) -> None:
    BoardFile(str(tmp_path), 7).save(board_of(1))
    restored = MetricsBoard()
    BoardFile(str(tmp_path), 8).load(restored)
    assert steps(restored) is None


@pytest.mark.parametrize("content", [b"", b"\xff", b"\x91\xc4\x01x", b"\x01"])
def test_a_file_that_cannot_be_read_is_logged(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = BoardFile(str(tmp_path), 7)
    file.save(board_of(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    file.load(MetricsBoard())
    assert "earlier metrics are lost" in caplog.text


def test_a_directory_that_is_gone_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    BoardFile(str(tmp_path / "gone"), 7).save(board_of(1))
    assert "cannot be kept" in caplog.text
