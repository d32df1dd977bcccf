"""Long base64 in a JSON body, which is a picture or another file: kept apart from the rest of the body.

In its place stands a *mark* with its digest. What decides on a request (model, limits, the text by whose
beginning servers are chosen) is read in the rest, which is small; so is what is changed in the body. The rest
is valid JSON if the body is, as base64 has neither quotes nor backslashes. Marks have a number that is drawn
for each body, so that no client can write one, and ask for more bytes than it sends.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Mapping

import msgspec
import numpy as np

MIN_VALUE_BYTES = 4 << 10
"""Base64 from this length on is kept apart: 3 kB of a picture."""
SLICE_BYTES = 64 << 10
"""Bytes of a body that are searched at a time: 0.1 ms."""
SPLIT_BYTES = 16 << 10
"""Smaller bodies are left as they are: what they have counts as text."""
TURN_BYTES = 512 << 10
"""Bytes in one turn of the event loop."""
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_"
_OF_NUMBERS = b"0123456789+-eE"
_IS_OTHER = bytes(byte not in _ALPHABET for byte in range(256))
_PREFIX = b"PenstockLongValue+++"
_NONCE_BYTES, _DIGEST_BYTES = 16, 20
_EVERY = b"0" * 2 * _NONCE_BYTES
MARK_BYTES = len(_PREFIX) + 2 * (_NONCE_BYTES + _DIGEST_BYTES)
"""A multiple of 4, as of base64."""
_ESCAPE_BYTES = len("u0041")
"""The most of an escape that looks like base64, after its backslash."""
_marks = re.compile(rb"%b[0-9a-f]{%d}" % (re.escape(_PREFIX), MARK_BYTES - len(_PREFIX))).finditer
_tokens = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL).finditer


class LongValues(msgspec.Struct, frozen=True):
    """The base64 of a body, in pieces, by mark."""

    by_mark: Mapping[bytes, list[bytes]]
    nonce: bytes = b""
    """Of the marks."""

    def filled(self, text: bytes) -> list[bytes]:
        """The pieces of a body that has marks: each of them replaced."""
        pieces, at = [], 0
        for match in _marks(text):
            if (value := self.by_mark.get(match[0])) is not None:
                pieces += [text[at : match.start()], *value]
                at = match.end()
        return [each for each in (*pieces, text[at:]) if each]

    def __bool__(self) -> bool:
        return bool(self.by_mark)

    def compared(self, text: bytes) -> tuple[bytes, int]:
        """A text whose marks are the same for the same base64 in every body, and how many it has."""
        if not self:
            return text, 0
        marks = sum(match[0] in self.by_mark for match in _marks(text))
        return text.replace(self.nonce, _EVERY) if marks else text, marks


NO_VALUES = LongValues({})


class LongValueScan:
    """Takes a body as it comes, each byte once, in slices."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the body so far."""
        self.keeps = True
        """Whether the base64 is kept; else only its digest is."""
        self._text = bytearray()
        """The body with marks, but for what follows."""
        self._waiting = bytearray()
        """Bytes that were not searched."""
        self._run: list[bytes] = []
        """Base64 at the end of what was searched,"""
        self._run_bytes = 0
        self._is_number = False
        """Whether the run begins as a long number does: it is text."""
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._values: dict[bytes, list[bytes]] = {}

    @property
    def text_bytes(self) -> int:
        """Bytes of the rest of the body, with marks."""
        return len(self._text) + (0 if self.in_value else self._run_bytes)

    @property
    def in_value(self) -> bool:
        """Whether the latest slice ends within a long value."""
        return self._run_bytes >= MIN_VALUE_BYTES and not self._is_number

    @property
    def values(self) -> int:
        """How many different long values have ended."""
        return len(self._values)

    def feed(self, part: bytes) -> None:
        self.size += len(part)
        at = SLICE_BYTES - len(self._waiting)
        self._waiting += part[:at]
        while len(self._waiting) >= SLICE_BYTES:
            self._search(bytes(self._waiting))
            self._waiting[:] = part[at : at + SLICE_BYTES]
            at += SLICE_BYTES

    def forget(self) -> None:
        """Keep no base64 from here on."""
        self.keeps = False
        self._values = {mark: [] for mark in self._values}
        if self.in_value:
            self._run = []

    def finish(self) -> tuple[bytes, LongValues]:
        """The body is complete: with marks, and what they stand for."""
        self._search(bytes(self._waiting))
        self._waiting.clear()
        self._end_run()
        return bytes(self._text), LongValues(self._values, self._nonce)

    def beginning(self) -> tuple[bytes, bytes]:
        """What has come, for :attr:`in_value`: with marks, ended so that it is JSON; and its bytes. What
        comes goes on with these."""
        mark = self._mark()
        closers = []
        for match in _tokens(self._text):
            if (token := match[0]) in (b"{", b"["):
                closers.append(b"}" if token == b"{" else b"]")
            elif token in (b"}", b"]") and closers:
                closers.pop()
        text = bytes(self._text) + mark
        pieces = [*LongValues(self._values).filled(bytes(self._text)), *self._run, bytes(self._waiting)]
        return b'%b"%b' % (text, b"".join(reversed(closers))), b"".join(pieces)

    def _search(self, piece: bytes) -> None:
        if self._run_bytes and not piece.translate(None, _ALPHABET):
            self._extend(piece)
            return
        others = np.flatnonzero(np.frombuffer(piece.translate(_IS_OTHER), np.bool_))
        if not len(others):
            self._extend(piece)
            return
        first, last = int(others[0]), int(others[-1])
        self._extend(piece[:first])
        self._end_run()
        at = first
        for index in np.flatnonzero(np.diff(others) > MIN_VALUE_BYTES):
            begin, end = int(others[index]) + 1, int(others[index + 1])
            self._text += piece[at:begin]
            self._extend(piece[begin:end])
            self._end_run()
            at = end
        self._text += piece[at : last + 1]
        self._extend(piece[last + 1 :])

    def _extend(self, piece: bytes) -> None:
        if not self._run_bytes and (at := self._text.rfind(b"\\", -_ESCAPE_BYTES)) >= 0:
            rest = at + 1 + _ESCAPE_BYTES - len(self._text)  # it may be of an escape, such as \n
            self._text += piece[:rest]
            piece = piece[rest:]
        if piece:
            self._digest.update(piece)
            if self._run_bytes < MIN_VALUE_BYTES <= self._run_bytes + len(piece):
                begin = b"".join((*self._run, piece))[:MIN_VALUE_BYTES]
                self._is_number = not begin.translate(None, _OF_NUMBERS)
            self._run_bytes += len(piece)
            if self.keeps or not self.in_value:
                self._run.append(piece)

    def _end_run(self) -> None:
        if not self._run_bytes:
            return
        if self.in_value:
            mark = self._mark()
            self._text += mark
            self._values.setdefault(mark, self._run if self.keeps else [])
        else:
            self._text += b"".join(self._run)
        self._run, self._run_bytes, self._is_number = [], 0, False
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def _mark(self) -> bytes:
        return b"%b%b%b" % (_PREFIX, self._nonce, self._digest.hexdigest().encode())


def split(body: bytes) -> tuple[bytes, LongValues]:
    """A body with marks, and what they stand for. Takes 2 ms for each MiB."""
    if len(body) < SPLIT_BYTES:
        return body, NO_VALUES
    scan = LongValueScan()
    scan.feed(body)
    return scan.finish()


async def split_by_turns(body: bytes) -> tuple[bytes, LongValues]:
    """The same for bodies of any length, with other work in between."""
    if len(body) <= TURN_BYTES:
        return split(body)
    scan = LongValueScan()
    for at in range(0, len(body), TURN_BYTES):
        scan.feed(body[at : at + TURN_BYTES])
        await asyncio.sleep(0)
    return scan.finish()
