"""What events have for each of their tokens besides its text, such as logprobs, made by columns.

An event is ``head + text + lists + closing``. A list is an opening and an item per token, whose pieces are
prepared per token id (:mod:`penstock.streaming.token_names`) or are numbers that are printed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.streaming.rows.http_framing import Objects, objects
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
_SEPARATORS = {kind: objects((between, _NOTHING)) for kind, between in _BETWEEN.items()}
"""What precedes an item: not the first one, the first one of a row."""
_CLOSINGS = objects((b"}", _NOTHING))
"""What follows the alternatives: with some, without."""


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
    size: int
    """Bytes besides the items."""
    between: int
    """Bytes between the items of two tokens."""
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
        closing = after[-1] + closing
        size = len(closing) + sum(map(len, openings))
        between = sum(len(_BETWEEN[kind]) for kind in kinds)
        return cls(openings, kinds, closing, names, width, size, between, ItemKind.PLACE in kinds, texts)


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
    begins: NDArray[np.bool_] | None
    """Which tokens are the first ones of their rows; None: all, and rows have one token each."""
    ids: I32
    """[T, W], with at least as many candidates as the fields have; -1: none."""
    values: F32
    places: NDArray[np.int64] | None


class SpelledItems(NamedTuple):
    """The items of T tokens."""

    cells: list[Objects]
    """For each list [T, pieces of an item]; with a separator, unless all tokens are the first ones of their
    rows."""
    sizes: NDArray[np.int64]
    """[T]: bytes of a token's items, without separators."""


def spell_items(fields: TokenFields, data: TokenData) -> SpelledItems:
    """Make the items of all lists."""
    return _Speller(fields, data).spell()


def join_items(kinds: Sequence[ItemKind], names: TokenNames, ids: I32, values: F32) -> list[bytes]:
    """Lists of tokens' names and logprobs, at least one token: JSON without the brackets. ``ids``,
    ``values``: candidates, [T, W]."""
    fields = TokenFields.make([(_NOTHING, kind) for kind in kinds], _NOTHING, names, ids.shape[1])
    begins = np.zeros(len(ids), np.bool_)
    begins[0] = True
    made = spell_items(fields, TokenData(ids[:, 0], begins, ids, values, None)).cells
    return [
        b"%b%b%b"
        % (_BEFORE.get(kind, _NOTHING), _NOTHING.join(cells.ravel().tolist()), _AFTER.get(kind, b""))
        for kind, cells in zip(fields.kinds, made, strict=True)
    ]


class _Speller:
    """Makes the items of some tokens."""

    def __init__(self, fields: TokenFields, data: TokenData) -> None:
        self._fields, self._data = fields, data
        self._sizes = np.zeros(len(data.tokens), np.int64)
        width = fields.width
        ids, values = data.ids[:, :width], data.values[:, :width]
        self._missing = ids < 0
        if any_true(self._missing):
            order = self._missing.argsort(axis=1, kind="stable")  # those that are given come first
            ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
            self._missing = ids < 0
            ids = np.where(self._missing, 0, ids)
        self._ids = ids
        if width:
            fields.names.spell(ids)
            texts, sizes = _numbers(np.maximum(values, np.float32(MIN_LOGPROB)))
            self._values, self._value_sizes = texts.reshape(-1, width), sizes.reshape(-1, width)

    def spell(self) -> SpelledItems:
        return SpelledItems([self._items(kind) for kind in self._fields.kinds], self._sizes)

    def _items(self, kind: ItemKind) -> Objects:
        """The cells of one list's items."""
        begins, width = self._data.begins, self._fields.width
        pieces = {
            ItemKind.OBJECT: 2 * width + 2,
            ItemKind.ALONE: 2,
            ItemKind.BY_TEXT: 4 * width - 1,
        }.get(kind, 1)
        cells = items = np.empty((len(self._sizes), pieces + (begins is not None)), np.object_)
        if begins is not None:
            cells[:, 0] = _SEPARATORS[kind].take(begins)
            items = cells[:, 1:]
        match kind:
            case ItemKind.OBJECT:
                self._add_objects(items)
            case ItemKind.ALONE:
                self._add_own(items)
            case ItemKind.BY_TEXT:
                self._add_by_text(items)
            case ItemKind.LOGPROB:
                items[:, 0] = self._values[:, 0]
                self._sizes += self._value_sizes[:, 0]
            case ItemKind.TEXT:
                names, own = self._fields.names, self._ids[:, 0]
                items[:, 0] = names.quoted.take(own)
                self._sizes += names.sizes.take(own)
            case ItemKind.PLACE:
                self._add_numbers(items, self._data.places)
            case ItemKind.ID:
                self._add_numbers(items, self._data.tokens)
        return cells

    def _add_numbers(self, items: Objects, numbers: NDArray[Any] | None) -> None:
        assert numbers is not None  # the fields have such a list
        items[:, 0], sizes = _numbers(numbers)
        self._sizes += sizes

    def _add_own(self, items: Objects) -> None:
        names, own = self._fields.names, self._ids[:, 0]
        items[:, 0], items[:, 1] = names.prefixes.take(own), self._values[:, 0]
        self._sizes += names.prefix_sizes.take(own)
        self._sizes += self._value_sizes[:, 0]

    def _add_objects(self, items: Objects) -> None:
        self._add_own(items)
        names, others, missing = self._fields.names, self._ids[:, 1:], self._missing[:, 1:]
        items[:, 2] = _TOP_LOGPROBS
        self._sizes += len(_TOP_LOGPROBS)
        items[:, -1] = _CLOSINGS.take(missing[:, 0])
        cells = items[:, 3:-1].reshape(len(items), -1, 2)
        cells[:, 0, 0] = names.prefixes.take(others[:, 0])
        cells[:, 1:, 0] = names.next_prefixes.take(others[:, 1:])
        cells[:, :, 1] = self._values[:, 1:]
        sizes = names.prefix_sizes.take(others) + self._value_sizes[:, 1:]
        sizes[:, 0] += 1
        sizes[:, 1:] += 2
        self._add_alternatives(cells, sizes, missing)

    def _add_by_text(self, items: Objects) -> None:
        """Of the same texts the first one's place has the last one's logprob."""
        names, ids = self._fields.names, self._ids
        keys, sizes = names.quoted.take(ids), names.sizes.take(ids) + self._value_sizes + 1
        items[:, 0], items[:, 1], items[:, 2] = keys[:, 0], b":", self._values[:, 0]
        if ids.shape[1] == 1:
            self._sizes += sizes[:, 0]
            return
        cells = items[:, 3:].reshape(len(items), -1, 4)
        cells[:, :, 0], cells[:, :, 1], cells[:, :, 2] = b",", keys[:, 1:], b":"
        cells[:, :, 3] = self._values[:, 1:]
        omitted = (ids[:, 1:] == ids[:, :1]) & ~self._missing[:, 1:]
        if any_true(omitted):
            again, place = omitted.nonzero()
            items[again, 2] = self._values[again, place + 1]
            sizes[again, 0] += self._value_sizes[again, place + 1] - self._value_sizes[again, 0]
        omitted |= self._missing[:, 1:]
        doubtful = np.logical_or.reduce(names.ambiguous.take(ids), axis=1)
        if any_true(doubtful):
            for token in np.flatnonzero(doubtful).tolist():
                given = ~self._missing[token]
                pairs = zip(keys[token, given].tolist(), self._values[token, given].tolist(), strict=True)
                whole = b",".join([b"%b:%b" % pair for pair in dict(pairs).items()])
                items[token, :3] = whole, _NOTHING, _NOTHING
                sizes[token, 0] = len(whole)
                omitted[token] = True
        self._sizes += sizes[:, 0]
        self._add_alternatives(cells, sizes[:, 1:] + 1, omitted)

    def _add_alternatives(self, cells: Objects, sizes: NDArray[np.int64], omitted: NDArray[np.bool_]) -> None:
        """Count the pieces of alternatives, without those to omit. ``cells``: [T, W - 1, pieces]."""
        if any_true(omitted):
            cells[omitted] = _NOTHING
            sizes[omitted] = 0
        self._sizes += sizes.sum(axis=1)


def _numbers(values: NDArray[Any]) -> tuple[Objects, NDArray[np.int64]]:
    """JSON of each number, and its size in bytes; both flat. A float32 has the fewest digits that read back
    as the same float32."""
    flat = np.ascontiguousarray(values).ravel()
    listed = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    bounds = (np.frombuffer(listed, np.uint8) == ord(",")).nonzero()[0]
    bounds = np.concatenate(((0,), bounds, (len(listed) - 1,)))
    return objects(listed[1:-1].split(b",")), bounds[1:] - bounds[:-1] - 1
