"""Undoes the chunked coding of replies."""

from __future__ import annotations


def unframed(chunks: bytes) -> bytes:
    """The data of complete chunks."""
    contents = []
    while chunks:
        header, _, rest = chunks.partition(b"\r\n")
        size = int(header, 16)
        contents.append(rest[:size])
        chunks = rest[size + 2 :]
    return b"".join(contents)
