"""A file with the entries of a board, in the run directory: it outlives every process but the supervisor.

The coordinator, or an API server without one, writes it before metrics are shown. So what a scraper has seen
is not lost when all processes that keep metrics are killed together.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from penstock.logging_setup import RateLimitedLog
from penstock.metrics.board import MetricsBoard
from penstock.metrics.snapshot import decode_snapshot

BOARD_FILE_PREFIX = "metrics-"
"""Prefix of the files' names."""
_decoder = msgspec.msgpack.Decoder(list[bytes])


class BoardFile:
    def __init__(self, run_dir: str, incarnation: int) -> None:
        """``incarnation``: the supervisor's, since a run directory may be used again."""
        self._path = Path(run_dir) / f"{BOARD_FILE_PREFIX}{incarnation:x}"
        self._warn = RateLimitedLog(logging.getLogger(__name__))

    def load(self, board: MetricsBoard) -> None:
        """Add what was saved to ``board``; nothing if there is no file. A fault is logged."""
        try:
            for data in _decoder.decode(self._path.read_bytes()):
                board.add_or_log(decode_snapshot(data), data)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._warn("load", "earlier metrics are lost: %s", error)

    def save(self, board: MetricsBoard) -> None:
        """Replace the file. A fault is logged."""
        data = msgspec.msgpack.encode([posted.data for posted in board])
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(self._path)
        except OSError as error:
            self._warn("save", "metrics cannot be kept over restarts: %s", error)
