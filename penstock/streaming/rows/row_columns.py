"""Columns of rows that are written together: all as chunks, or all as frames."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.numbered_rows import NumberedRows
from penstock.streaming.rows.row_grid import RowGrid
from penstock.streaming.rows.token_fields import TokenFields
from penstock.wire.arrays import I32


class RowColumns(NamedTuple):
    """What the row writer needs of the streams, in the order in which their rows are written."""

    order: NDArray[np.intp] | None
    """Indexes that sort the rows by connection; None: they are sorted."""
    handles: I32
    sizes: NDArray[np.int64]
    """Bytes of an event besides its text, without framing."""
    targets: NDArray[np.int64]
    """Descriptors of sockets; for frames, slots of the streams' windows."""
    starts: NDArray[np.intp]
    """For frames, the index of each connection's first row."""
    connections: NDArray[np.uint16] | None
    """For frames, the connections; None: the rows are chunks."""
    fields: TokenFields | None
    """Of all streams."""
    grid: RowGrid
    numbered: NumberedRows | None
    messages: NDArray[np.intp] | None
    """Indexes of rows that are messages of a WebSocket, not chunks; None: there are none."""
