"""The experts that computed a choice's tokens, as vLLM's replies have them: a .npy file in base64."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator

import numpy as np

from penstock.streaming.engine_faults import INVALID_ROUTES, InvalidOutputError
from penstock.wire.messages import RoutedExperts

PIECE_BYTES = 3 << 17
"""Bytes that are encoded at once, in a quarter of a millisecond; a multiple of 3."""


def check_routes(routes: RoutedExperts, most: int) -> None:
    """Raises InvalidOutputError unless these are the experts of whole tokens, at most ``most``."""
    each = routes.layers * routes.per_token * routes.width
    if len(routes.data) % each or len(routes.data) > most * each:
        raise InvalidOutputError(
            INVALID_ROUTES, f"{len(routes.data)} bytes of experts, for at most {most} tokens of {each} bytes"
        )


def encoded(routes: RoutedExperts) -> Iterator[bytes]:
    """A JSON string, in pieces: base64 of a .npy file with an array [tokens, layers, experts per token] of
    uint8, or of uint16 for models with more than 256 experts."""
    file = io.BytesIO()
    shape = -1, routes.layers, routes.per_token
    dtype = np.dtype("u1" if routes.width == 1 else "<u2")
    np.save(file, np.frombuffer(routes.data, dtype).reshape(shape), allow_pickle=False)
    content = file.getbuffer()
    yield b'"'
    for start in range(0, len(content), PIECE_BYTES):
        yield b64encode(content[start : start + PIECE_BYTES])
    yield b'"'
