"""The streams whose events have more than text for each token, as columns by stream handle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.http_framing import Objects, objects
from penstock.streaming.rows.numbered_rows import sizes_of
from penstock.streaming.rows.row_grid import RowTexts
from penstock.streaming.rows.token_fields import TokenData, TokenFields, spell_rows
from penstock.streaming.stream import StreamFields
from penstock.wire.arrays import F32, I32, counts_up
from penstock.wire.frames import TokenFrame
from penstock.wire.logprobs import Logprobs

NO_FIELDS = 0
_UNKNOWN = -1


class FieldColumns:
    """The fields of streams, and where their next tokens begin in their texts."""

    def __init__(self, texts: Objects) -> None:
        """``texts``: by token id, None if the text is not context-free."""
        self.count = 0
        """Streams with fields."""
        self._texts = texts
        self._numbers = np.zeros(0, np.uint16)
        self._fields: list[TokenFields | None] = [None]
        """By number. Few differ: an API, with or without token ids, a number of alternatives."""
        self._places = np.zeros(0, np.int64)
        """Where the next token begins, in characters. Holds between :meth:`enter` and :meth:`leave`;
        otherwise the stream's ``places`` know it."""
        self._characters = np.zeros(0, np.int64)
        """Characters of the text of each token id; _UNKNOWN until they are asked for."""

    def grow(self, more: int) -> None:
        """There are so many more handles."""
        self._numbers = np.concatenate((self._numbers, np.zeros(more, np.uint16)))
        self._places = np.concatenate((self._places, np.zeros(more, np.int64)))

    # -- one stream

    def enter(self, handle: int, fields: StreamFields) -> None:
        """The stream's rows come here next."""
        layout, places = fields
        if not self._numbers[handle]:
            if layout not in self._fields:
                self._fields.append(layout)
            self._numbers[handle] = self._fields.index(layout)
            self.count += 1
        if places is not None:
            self._places[handle] = places.at

    def leave(self, handle: int, fields: StreamFields) -> None:
        """The stream's next row goes to its reply."""
        if fields.places is not None:
            fields.places.at = int(self._places[handle])

    def close(self, handle: int) -> None:
        """The stream has ended."""
        if self._numbers[handle]:
            self._numbers[handle] = NO_FIELDS
            self.count -= 1

    # -- rows

    def common(self, handles: I32) -> tuple[bool, TokenFields | None]:
        """Whether all streams have the same fields, and these."""
        numbers = self._numbers.take(handles)
        first = numbers[0]
        return numbers.tobytes() == first.tobytes() * len(numbers), self._fields[first]

    def groups(self, handles: I32) -> list[tuple[TokenFields | None, NDArray[np.intp]]]:
        """The fields of streams, and the indexes of those that have them."""
        numbers = self._numbers.take(handles)
        return [
            (self._fields[number], np.flatnonzero(numbers == number))
            for number in np.unique(numbers).tolist()
        ]

    def advance(self, handles: I32, texts: RowTexts) -> None:
        """The rows of these streams are written."""
        if texts.characters is not None:
            self._places.put(handles, self._places.take(handles) + texts.characters)  # cheaper than +=

    def spell(
        self,
        frame: TokenFrame,
        fields: TokenFields,
        handles: I32,
        texts: RowTexts,
        tokens: NDArray[np.intp] | None,
    ) -> tuple[RowTexts, NDArray[np.int64]] | None:
        """Make the text and lists of rows, and count their bytes. Their tokens are at ``tokens`` in the
        frame, None: all. Returns None if some token lacks its logprobs, or its text depends on others."""
        candidates = _candidates(frame, tokens, fields.width)
        if candidates is None:
            return None
        own = frame.tokens if tokens is None else frame.tokens.take(tokens)
        counts = texts.counts
        ends = None if counts is None else counts.cumsum()
        places = of_row = None
        if fields.placed:
            places = self._places.take(handles)
            of_row = of_tokens = self._characters_of(own)
            if counts is not None and ends is not None:
                starts, before = ends - counts, of_tokens.cumsum() - of_tokens
                places = before + (places - before.take(starts)).repeat(counts)
                of_row = np.add.reduceat(of_tokens, starts)
        data = TokenData(own, None if ends is None else ends.tolist(), *candidates, places)
        rows = spell_rows(fields, data, texts.texts.tolist())
        if rows is None:
            return None
        return RowTexts(objects(rows), None, of_row), sizes_of(rows)

    def spell_logprobs(
        self,
        frame: TokenFrame,
        fields: Sequence[StreamFields],
        handles: I32,
        texts: RowTexts,
        tokens: NDArray[np.intp],
    ) -> list[tuple[bytes, int]]:
        """The field ``logprobs`` of rows whose streams have the same layout, and the characters of their
        texts, for the replies. ``tokens``: where the rows' tokens are in the frame. Empty if some token
        lacks its logprobs."""
        layout = fields[0].layout.logprobs
        if layout is None:
            return []
        self._places[handles] = [0 if each.places is None else each.places.at for each in fields]
        spelled = self.spell(frame, layout, handles, texts, tokens)
        if spelled is None:
            return []
        made = [row + layout.closing for row in spelled[0].joined()]
        characters = spelled[0].characters
        return list(zip(made, repeat(0) if characters is None else characters.tolist(), strict=False))

    def _characters_of(self, tokens: I32) -> NDArray[np.int64]:
        """Characters of the texts of tokens."""
        if not len(self._characters):
            self._characters = np.full(len(self._texts), _UNKNOWN, np.int64)
        found = self._characters.take(tokens)
        if b"\xff" in found.tobytes():  # as in _UNKNOWN
            for token in np.unique(tokens[found == _UNKNOWN]).tolist():
                self._characters[token] = _count_characters(self._texts[token])
            found = self._characters.take(tokens)
        return found


def _candidates(frame: TokenFrame, tokens: NDArray[np.intp] | None, width: int) -> tuple[I32, F32] | None:
    """Ids and values of the candidates for tokens of a frame, [T, W] each, with ``width`` at least."""
    if not width:
        none = np.zeros((len(frame.tokens) if tokens is None else len(tokens), 0), np.int32)
        return none, none.astype(np.float32)
    given = frame.logprobs
    if given is None:
        return None
    ids, values = given.ids, given.values
    entries = _entries(given, len(frame.tokens), tokens)
    if entries is not None:
        if not len(entries) or entries.min() < 0:
            return None
        ids, values = ids.take(entries, axis=0), values.take(entries, axis=0)
    lacking = width - ids.shape[1]
    if lacking > 0:
        ids = np.pad(ids, ((0, 0), (0, lacking)), constant_values=-1)
        values = np.pad(values, ((0, 0), (0, lacking)), constant_values=-np.inf)
    return ids, values


def _entries(given: Logprobs, count: int, tokens: NDArray[np.intp] | None) -> NDArray[np.intp] | None:
    """Index of the first entry of each token, -1: none; None: entry by entry, of all ``count`` tokens.
    ``tokens``: of which tokens, None: of all."""
    if len(given.token) == count and counts_up(given.token):
        return tokens
    entries: NDArray[np.intp] = np.full(count, -1)
    entries[given.token[::-1]] = np.arange(len(given.token))[::-1]
    return entries if tokens is None else entries.take(tokens)


def _count_characters(escaped: bytes | None) -> int:
    """Characters of a text that is escaped for JSON."""
    if escaped is None:
        return 0
    text: str = msgspec.json.decode(b'"%b"' % escaped, type=str)
    return len(text)
