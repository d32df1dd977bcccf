"""What events have for each of their tokens besides its text, such as logprobs, made by columns.

An event is ``head + text + lists + closing``. A list is an opening and an item per token, whose pieces are
prepared per token id (:mod:`penstock.streaming.token_names`) or are numbers that are printed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.streaming.rows.http_framing import Objects
from penstock.streaming.token_names import TokenNames
from penstock.wire.arrays import F32, I32, any_true
from penstock.wire.logprobs import Logprobs

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express; OpenAI and vLLM use the same value."""
_NOTHING = b""


class ItemKind(Enum):
    """What a list has for each token."""

    OBJECT = "object"
    """Name, bytes, logprob and alternatives. What follows the last item closes it."""
    ALONE = "object without alternatives"
    """The same of fields with one candidate per token."""
    BY_TEXT = "by text"
    """The logprobs of the token and its alternatives by their texts. The list's opening opens the first item,
    and what follows the last one closes it."""
    LOGPROB = "logprob"
    TEXT = "text"
    PLACE = "place"
    """Where the token begins in the choice's text, in characters."""
    ID = "id"


_TOP_LOGPROBS = b',"top_logprobs":['
"""Precedes a token's alternatives."""
_BETWEEN = dict.fromkeys(ItemKind, b",") | {
    ItemKind.OBJECT: b"]},",
    ItemKind.ALONE: _TOP_LOGPROBS + b"]},",
    ItemKind.BY_TEXT: b"},{",
}
"""What stands between two items."""
_BEFORE = {ItemKind.BY_TEXT: b"{"}
"""What the first item's pieces lack."""
_AFTER = {ItemKind.OBJECT: b"]}", ItemKind.ALONE: _TOP_LOGPROBS + b"]}", ItemKind.BY_TEXT: b"}"}
"""What the last item's pieces lack."""
_GREATER = bytes(range(0xC6))
"""What the last byte of a little-endian float32 can be if it is above -8192."""


class TokenFields(NamedTuple):
    """The lists of an event. Equal ones are written together."""

    openings: tuple[bytes, ...]
    """What precedes each list's items, from the end of the text or of the list before."""
    kinds: tuple[ItemKind, ...]
    closing: bytes
    """What follows the last list's items."""
    names: TokenNames
    width: int
    """Candidates per token with logprobs, the token itself included; 0: without."""
    placed: bool
    """Whether there is a list of places."""
    texts: bool = True
    """Whether events have the texts of their tokens."""

    logprobs: TokenFields | None = None
    """The field ``logprobs`` alone, from its value's first byte to the last one."""

    @classmethod
    def make(
        cls,
        lists: Sequence[tuple[bytes, ItemKind]],
        closing: bytes,
        names: TokenNames,
        width: int,
        *,
        texts: bool = True,
    ) -> TokenFields:
        """``lists``: what precedes each list's first item, and what it lists; ``closing`` follows the last
        list's last item."""
        kinds = tuple(ItemKind.ALONE if width == 1 and kind is ItemKind.OBJECT else kind for _, kind in lists)
        after = [b"", *(_AFTER.get(kind, b"") for kind in kinds)]
        pairs = zip(after, lists, strict=False)
        openings = tuple(end + opening + _BEFORE.get(kind, b"") for end, (opening, kind) in pairs)
        return cls(openings, kinds, after[-1] + closing, names, width, ItemKind.PLACE in kinds, texts)


@dataclass(slots=True)
class SpelledLogprobs(Logprobs):
    """Logprobs of a row, all of whose tokens are text, and what an event says of them."""

    field: bytes = b""
    """The API's field ``logprobs``."""
    characters: int = 0
    """Of the row's text, if the field has places."""


class TokenData(NamedTuple):
    """What is known of T tokens."""

    tokens: I32
    ends: list[int] | None
    """Where each row ends, the last one with T; None: rows have one token each."""
    ids: I32
    """[T, W], with at least as many candidates as the fields have; -1: none."""
    values: F32
    places: NDArray[np.int64] | None


def spell_rows(fields: TokenFields, data: TokenData, texts: Sequence[bytes | None]) -> list[bytes] | None:
    """Make each row's part of its event, from the text to the last list's items. ``texts``: of the tokens;
    None if one of them is."""
    speller = _Speller(fields, data)
    try:
        return speller.rows(texts)  # type: ignore[arg-type]
    except TypeError:  # cheaper than to look
        if None in texts:
            return None
        raise


def join_items(kinds: Sequence[ItemKind], names: TokenNames, ids: I32, values: F32) -> list[bytes]:
    """Lists of tokens' names and logprobs, at least one token: JSON without the brackets. ``ids``,
    ``values``: candidates, [T, W]."""
    fields = TokenFields.make([(_NOTHING, kind) for kind in kinds], _NOTHING, names, ids.shape[1])
    speller = _Speller(fields, TokenData(ids[:, 0], [len(ids)], ids, values, None))
    return [
        b"%b%b%b" % (_BEFORE.get(kind, _NOTHING), speller.items(kind)[0][0], _AFTER.get(kind, _NOTHING))
        for kind in fields.kinds
    ]


class _Speller:
    """Makes the items of some tokens, as columns of pieces."""

    def __init__(self, fields: TokenFields, data: TokenData) -> None:
        self._fields, self._data = fields, data
        width = fields.width
        ids, values = data.ids[:, :width], data.values[:, :width]
        self._missing: NDArray[np.bool_] | None = None
        if width > 1:
            missing = ids < 0
            if any_true(missing):
                order = missing.argsort(axis=1, kind="stable")  # those that are given come first
                ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
                self._missing = ids < 0
                ids = np.where(self._missing, 0, ids)
        self._ids, self._values = ids, values
        if width:
            fields.names.spell(ids)
            self._numbers = _logprobs(values)

    def rows(self, texts: list[bytes]) -> list[bytes]:
        """See :func:`spell_rows`."""
        columns: list[Iterable[bytes]] = []
        if self._fields.texts:
            columns += self._by_row([texts], _NOTHING)
        for opening, kind in zip(self._fields.openings, self._fields.kinds, strict=True):
            columns += repeat(opening), *self.items(kind)
        return list(map(_NOTHING.join, zip(*columns, strict=False)))

    def items(self, kind: ItemKind) -> list[list[bytes]]:
        """The items of one list, as columns with a piece for each row."""
        return self._by_row(self._pieces(kind), _BETWEEN[kind])

    def _by_row(self, columns: list[list[bytes]], between: bytes) -> list[list[bytes]]:
        """Join the pieces of each row. ``columns``: with a piece for each token."""
        ends = self._data.ends
        if ends is None:
            return columns
        bounds = zip([0, *ends], ends, strict=False)
        if len(columns) == 1:
            return [[between.join(columns[0][start:end]) for start, end in bounds]]
        width = 1 + len(columns)
        pieces = [between] * (width * ends[-1])
        for place, column in enumerate(columns, 1):
            pieces[place::width] = column
        return [[_NOTHING.join(pieces[width * start + 1 : width * end]) for start, end in bounds]]

    def _pieces(self, kind: ItemKind) -> list[list[bytes]]:
        """The items of one list, as columns with a piece for each token."""
        data, names, width = self._data, self._fields.names, self._fields.width
        match kind:
            case ItemKind.LOGPROB:
                return [self._numbers[::width]]
            case ItemKind.TEXT:
                return [names.quoted.take(self._ids[:, 0]).tolist()]
            case ItemKind.PLACE:
                assert data.places is not None  # the fields have such a list
                return [_listed(data.places)]
            case ItemKind.ID:
                return [_listed(data.tokens)]
            case ItemKind.BY_TEXT:
                return self._by_text()
        own = [names.prefixes.take(self._ids[:, 0]).tolist(), self._numbers[::width]]
        return own if kind is ItemKind.ALONE else own + self._alternatives()

    def _alternatives(self) -> list[list[bytes]]:
        """What follows the logprob of an object."""
        names, others = self._fields.names, self._ids[:, 1:]
        prefixes, ends = names.next_prefixes.take(others), [b"}"] * len(others)
        prefixes[:, 0] = names.prefixes.take(others[:, 0])
        missing = None if self._missing is None else self._missing[:, 1:]
        if missing is not None:
            for token in np.flatnonzero(missing[:, 0]).tolist():
                ends[token] = _NOTHING
        return [[_TOP_LOGPROBS] * len(others), *self._pairs(prefixes, missing), ends]

    def _by_text(self) -> list[list[bytes]]:
        """Of the same texts the first one's place has the last one's logprob."""
        names, ids, numbers, width = self._fields.names, self._ids, self._numbers, self._fields.width
        keys, own = names.quoted.take(ids[:, 0]).tolist(), numbers[::width]
        columns = [keys, [b":"] * len(keys), own]
        if width == 1:
            return columns
        omitted = again = ids[:, 1:] == ids[:, :1]
        if self._missing is not None:
            omitted, again = again | self._missing[:, 1:], again & ~self._missing[:, 1:]
        bits = self._values.view(np.int32)
        changed = again & (bits[:, 1:] != bits[:, :1])
        if any_true(changed):
            for token, place in zip(*map(np.ndarray.tolist, changed.nonzero()), strict=True):
                own[token] = numbers[width * token + 1 + place]
        doubtful = np.logical_or.reduce(names.ambiguous.take(ids), axis=1)
        if any_true(doubtful):
            for token in np.flatnonzero(doubtful).tolist():
                given = ids[token] if self._missing is None else ids[token, ~self._missing[token]]
                pairs = zip(names.quoted.take(given).tolist(), numbers[width * token :], strict=False)
                whole = b",".join([b"%b:%b" % pair for pair in dict(pairs).items()])
                own[token] = whole[len(keys[token]) + 1 :]
                omitted[token] = True
        return columns + self._pairs(names.next_keys.take(ids[:, 1:]), omitted)

    def _pairs(self, names: Objects, omitted: NDArray[np.bool_] | None) -> list[list[bytes]]:
        """Names and logprobs of alternatives, without those to omit. Both are [T, W - 1]."""
        width = self._fields.width
        numbers = [self._numbers[place::width] for place in range(1, width)]
        if omitted is not None and any_true(omitted):
            names[omitted] = _NOTHING
            for token, place in zip(*map(np.ndarray.tolist, omitted.nonzero()), strict=True):
                numbers[place][token] = _NOTHING
        return list(chain.from_iterable(zip(names.T.tolist(), numbers, strict=True)))


def _logprobs(values: F32) -> list[bytes]:
    """JSON of logprobs; flat."""
    if values.tobytes()[3::4].translate(None, _GREATER):
        values = np.maximum(values, np.float32(MIN_LOGPROB))
    return _listed(values)


def _listed(numbers: NDArray[Any]) -> list[bytes]:
    """JSON of each number; flat. A float32 has the fewest digits that read back as the same float32."""
    return orjson.dumps(numbers.ravel(), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
