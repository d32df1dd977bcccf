"""Which of an output's logprobs are those of its text, where the output has reasoning and calls as well."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.generation.parsers.delta import Delta, TextDelta
from penstock.generation.replies.logprobs import TokenLogprobs

_decode_bytes = msgspec.json.Decoder(list[int]).decode
_BEFORE_BYTES = len(b',"bytes":')
"""Of a token's ``tail``."""


def entries_by_piece(delta: Delta, logprobs: TokenLogprobs | None) -> list[bytes | None]:
    """For each piece of ``delta`` the logprobs of its tokens as a JSON list; None for what is no text.

    ``logprobs``: of the tokens that the delta comes from. The pieces are found one after the other in the
    text of these. A token belongs to the piece in which it begins.
    """
    if logprobs is None:
        return [None] * len(delta.pieces)
    begins: list[int] = []
    output = bytearray()
    for token in logprobs.ids[:, 0].tolist():
        begins.append(len(output))
        output += bytes(_decode_bytes(logprobs.names[token].tail[_BEFORE_BYTES:-1]))
    found: list[bytes | None] = []
    for piece, (start, end) in zip(delta.pieces, _places(delta, bytes(output)), strict=True):
        rows = [row for row, begin in enumerate(begins) if start <= begin < end]
        if len(delta.pieces) == 1 and not rows:  # its start was held back, and sent with other tokens
            rows = [*range(len(begins))]
        if not _is_text(piece) or not rows:
            found.append(None)
            continue
        part = slice(rows[0], rows[-1] + 1)
        own = logprobs._replace(ids=logprobs.ids[part], values=logprobs.values[part])
        found.append(b"".join(own.entries()))
    return found


def _is_text(piece: object) -> bool:
    return isinstance(piece, TextDelta) and not piece.reasoning


def _places(delta: Delta, output: bytes) -> Iterator[tuple[int, int]]:
    """Where the text of each piece begins and ends; both are equal if it is not found."""
    place = 0
    for number, piece in enumerate(delta.pieces, 1):
        text = piece.text.encode() if isinstance(piece, TextDelta) else b""
        is_end = number == len(delta.pieces) and output.endswith(text, place)
        start = len(output) - len(text) if is_end else output.find(text, place) if text else -1
        if start >= 0:
            place = start + len(text)
            yield start, place
        else:
            yield place, place
