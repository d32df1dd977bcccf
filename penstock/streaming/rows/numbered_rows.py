"""Rows whose events have a number: see :class:`EventRecord`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.event_record import NUMBERED_TAIL, EventRecord
from penstock.streaming.rows.http_framing import Objects, objects

MAX_FIELD = 64
"""Maximum bytes of a number as it stands in an event."""


class NumberedRows(NamedTuple):
    """Some rows of a frame."""

    rows: NDArray[np.intp]
    """Their indexes."""
    records: list[EventRecord]
    tails: list[bytes]
    """What follows the number in an event of each."""
    tail_sizes: NDArray[np.int64]

    def numbered_tails(self) -> tuple[Objects, NDArray[np.int64]]:
        """What follows the text in the next event of each, and the bytes that its number takes."""
        pairs = zip(self.records, self.tails, strict=True)
        tails = [NUMBERED_TAIL % (record.number, tail) for record, tail in pairs]
        return objects(tails), sizes_of(tails) - self.tail_sizes

    def add(self, texts: Iterable[bytes]) -> None:
        """Count an event of each row."""
        for record, text in zip(self.records, texts, strict=True):
            record.number += 1
            record.text += text


def sizes_of(values: list[bytes]) -> NDArray[np.int64]:
    """The size in bytes of each value."""
    return np.fromiter(map(len, values), np.int64, len(values))
