"""Token ids as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.http.errors import encode_json
from penstock.wire.arrays import I32

JSON_PIECE = 1 << 15
"""Token ids that become JSON at a time: 1 ms."""


def token_list(ids: Sequence[int] | I32) -> Iterator[bytes]:
    """A JSON list of token ids, in pieces."""
    separator = b"["
    for start in range(0, len(ids), JSON_PIECE):
        part = ids[start : start + JSON_PIECE]
        yield separator + encode_json(part.tolist() if isinstance(part, np.ndarray) else part)[1:-1]
        separator = b","
    yield b"[]" if separator == b"[" else b"]"
