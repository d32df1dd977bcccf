"""Takes long base64 out of a body before it is decoded.

A picture of a few megabytes is a string that nobody has to look at but the media worker. With a short name in
its place a body is as small as its text: it is decoded and planned on the event loop like any other.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import msgspec

from penstock.generation.media.source import ImageSource
from penstock.http.body_errors import malformed

MIN_LIFTED = 4096
"""Bytes of the shortest string that is lifted."""
_NAME = f"penstockPart{secrets.token_hex(16)}x"
"""Of base64's alphabet, so that a name passes for data. Nobody else can name a part."""
_NAMED = re.compile(_NAME.encode() + rb"(\d+)")
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_START = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*"|"data:[A-Za-z0-9.+/-]{1,64};base64,')
"""Before base64: in a field ``data``, or in a data: URL."""


class LiftedBody:
    """A body and the strings that were taken out of it."""

    def __init__(self, whole: bytes) -> None:
        self.whole = whole
        self.parts: list[memoryview] = []
        """Base64, by the numbers in their names."""
        view, pieces, at = memoryview(whole), list[bytes | memoryview](), 0
        found = _START.search(whole)
        while found is not None:
            start = found.end()
            end = whole.find(b'"', start)
            if end - start >= MIN_LIFTED and whole.find(b"\\", start, end) < 0:
                pieces += (view[at:start], f"{_NAME}{len(self.parts)}".encode())
                self.parts.append(view[start:end])
                at = end
            found = _START.search(whole, max(start, end))
        self.body = b"".join((*pieces, view[at:])) if self.parts else whole
        """With names in the strings' places."""

    def restored(self, text: bytes) -> bytes:
        """JSON that was made of the body, with the data in the names' places. Raises ApiError if that is no
        JSON: the data was never decoded."""
        pieces: list[bytes | memoryview] = list(_NAMED.split(text))  # texts and numbers in turns
        pieces[1::2] = (self.parts[int(number)] for number in pieces[1::2])
        made = b"".join(pieces)
        try:
            if not made.isascii():
                made.decode()
            _check_json(made)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise malformed(self.whole, error) from None
        return made

    def are_seen(self, images: Sequence[ImageSource]) -> bool:
        """Whether all parts are pictures that the model sees. Otherwise the whole body is to be decoded: what
        is none may be text, such as an argument of a tool."""
        return {part_of(image.url) for image in images} >= set(range(len(self.parts)))


def part_of(url: str) -> int:
    """The number of the part that is the data of ``url``; -1: it is no part's name."""
    _, named, number = url.rpartition(_NAME)
    return int(number) if named and number.isdecimal() else -1
