"""Collects logprobs of prompt and output tokens as columns, and formats them as JSON in pieces.

A reply can have millions of candidates. Columns take 8 bytes for each, JSON about 70; a piece takes about a
millisecond to format, so that the event loop serves others in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.generation.replies.text_places import TextPlaces
from penstock.streaming.engine_faults import INVALID_LOGPROBS, InvalidOutputError
from penstock.streaming.rows.token_fields import MIN_LOGPROB, ItemKind, join_items
from penstock.streaming.token_names import TokenNames
from penstock.wire.arrays import F32, I32
from penstock.wire.logprobs import ENTRY_CANDIDATES, Logprobs, PromptLogprobs

PIECE_CANDIDATES = 1024
"""Candidates per piece of JSON: about 1 ms (measured: 0.4 to 1 us per candidate)."""
MIN_BY_COLUMNS = 64
"""Candidates that are spelled together in less time than one by one."""
COMPACTED_AT = 64
"""Rows of candidates that are kept as they came."""
Candidates = tuple[list[int], list[bytes]]
"""Ids and JSON logprobs of the candidates for one token, its own first; ids below 0 are no candidates."""


class _Columns:
    """Candidates of consecutive tokens, ``width`` each."""

    __slots__ = ("_ids", "_parts", "_pending", "_values", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self._ids = bytearray()
        self._values = bytearray()
        self._parts: list[tuple[I32, F32]] = []
        """The latest ones as they came: parts of frames, which they keep in memory."""
        self._pending = 0

    def __len__(self) -> int:
        return len(self._ids) // (4 * self.width) + self._pending

    def add(self, ids: I32, values: F32) -> None:
        """``ids``, ``values``: [L, W] for any W."""
        if not len(ids):
            return  # none of a row's tokens is part of the text
        self._parts.append((ids, values))
        self._pending += len(ids)
        if self._pending >= COMPACTED_AT:
            self._compact()

    def _compact(self) -> None:
        for ids, values in self._parts:
            self._ids += _fitted(ids, self.width, -1).tobytes()
            self._values += _fitted(values, self.width, -np.inf).tobytes()
        self._parts, self._pending = [], 0

    def take_columns(self) -> tuple[I32, F32]:
        """All ids and values, which are removed: [L, width]."""
        if self._pending == 1 and not self._ids:  # a stream's usual event
            ids, values = self._parts.pop()
            self._pending = 0
            if ids.shape[1] == self.width:
                return ids, values
            return _fitted(ids, self.width, -1), _fitted(values, self.width, -np.inf)
        ids, values = self.arrays()
        self._ids, self._values = bytearray(), bytearray()
        return ids, values

    def arrays(self) -> tuple[I32, F32]:
        """All ids and values: [L, width]."""
        self._compact()
        shape = -1, self.width
        return (
            np.frombuffer(bytes(self._ids), np.int32).reshape(shape),
            np.frombuffer(bytes(self._values), np.float32).reshape(shape),
        )


class PromptLogprobFormatter:
    """Logprobs of one prompt's tokens, as the engine sends them. The first token has none."""

    __slots__ = ("_columns", "_names", "_ranks", "_tokens")

    def __init__(self, names: TokenNames, tokens: Sequence[int], alternatives: int) -> None:
        """``alternatives``: maximum number per token."""
        self._names = names
        self._tokens = tokens
        self._columns = _Columns(1 + alternatives)
        self._ranks = bytearray()
        """int32 rank of each token of the prompt, from the second one on, like ``_columns``."""

    def __len__(self) -> int:
        """Tokens that have logprobs."""
        return len(self._columns)

    def add(self, logprobs: PromptLogprobs) -> None:
        """Add the next tokens; repeated ones are ignored. Raises InvalidOutputError if some are
        missing."""
        ids, values, position, rank = logprobs.ids, logprobs.values, logprobs.position, logprobs.rank
        if self._columns.width > ENTRY_CANDIDATES:
            first = rank > 0
            ids, values = _joined(ids, values, np.cumsum(first, dtype=np.int32), self._columns.width)
            position, rank = position[first], rank[first]
            if len(ids) != len(rank):
                raise InvalidOutputError(INVALID_LOGPROBS, "prompt logprobs that continue nothing")
        known = len(self._columns) + 1
        before = np.maximum.accumulate(np.concatenate(([known - 1], position)))[:-1]
        fresh = position > before
        positions = position[fresh]
        missing = np.flatnonzero(positions != np.arange(known, known + len(positions)))
        if len(missing):
            due, got = known + int(missing[0]), int(positions[missing[0]])
            raise InvalidOutputError(
                INVALID_LOGPROBS, f"prompt logprobs from {got}, but those from {due} are due"
            )
        self._columns.add(ids[fresh], values[fresh])
        self._ranks += rank[fresh].astype(np.int32).tobytes()

    def field(self) -> Iterator[bytes]:
        """vLLM's field ``prompt_logprobs``, in pieces: candidates by token id for each token, its own
        first."""
        if self._columns.width > PIECE_CANDIDATES:
            yield from self._wide_field()
            return
        names = self._names
        others = [b',"rank":%d,"decoded_token":' % rank for rank in range(1, self._columns.width)]
        ranks = np.frombuffer(bytes(self._ranks), np.int32).tolist()
        yield b"[null"
        number = 0
        for rows in _pieces(*self._columns.arrays()):
            piece = []
            for ids, values in rows:
                all_ranks = [b',"rank":%d,"decoded_token":' % ranks[number], *others]
                shown: dict[int, bytes] = {}
                for token, value, rank in zip(ids, values, all_ranks, strict=True):
                    if token >= 0 and token not in shown:
                        shown[token] = b'"%d":{"logprob":%b%b%b}' % (token, value, rank, names[token].quoted)
                piece.append(b",{%b}" % b",".join(shown.values()))
                number += 1
            yield b"".join(piece)
        yield b"]"

    def _wide_field(self) -> Iterator[bytes]:
        """The field ``prompt_logprobs`` for tokens with very many candidates, in pieces."""
        names, ranks = self._names, np.frombuffer(bytes(self._ranks), np.int32).tolist()
        ids, values = self._columns.arrays()
        yield b"[null"
        for row, own_rank in enumerate(ranks):
            own, separator = int(ids[row, 0]), b",{"
            for start in range(0, ids.shape[1], PIECE_CANDIDATES):
                part = slice(start, start + PIECE_CANDIDATES)
                texts = _json_values(values[row, part])
                shown = [
                    b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
                    % (token, value, rank or own_rank, names[token].quoted)
                    for rank, (token, value) in enumerate(
                        zip(ids[row, part].tolist(), texts, strict=True), start
                    )
                    if token >= 0 and (token != own or not rank)
                ]
                if shown:
                    yield separator + b",".join(shown)
                    separator = b","
            yield b"}"
        yield b"]"

    def echoed(self, alternatives: int) -> tuple[int, I32, F32]:
        """The prompt's first token, and the candidates for the following ones: [L, 1 + alternatives]."""
        width = 1 + alternatives
        ids, values = self._columns.arrays()
        return self._tokens[0], _fitted(ids, width, -1), _fitted(values, width, -np.inf)


class TokenLogprobs(NamedTuple):
    """Logprobs of consecutive tokens of a choice."""

    names: TokenNames
    ids: I32
    """int32[L, W]: per token its own id and the best alternatives, which may include it."""
    values: F32
    """float32[L, W]"""
    places: TextPlaces
    """Places of the choice's next tokens; they are asked for once, in order, if at all."""
    unscored: int | None = None
    """A token before those in the columns, which has no logprobs: the first one of an echoed prompt."""

    def pieces(self) -> Iterator[Iterator[Candidates]]:
        """The rows of the columns, in pieces."""
        return _pieces(self.ids, self.values)

    @property
    def wide(self) -> bool:
        """Whether the candidates of one token are more than a piece: they come in ``slices``."""
        return bool(self.ids.shape[1] > PIECE_CANDIDATES)

    def slices(self, row: int) -> Iterator[Candidates]:
        """The candidates of the token at ``row``, in pieces."""
        for start in range(0, self.ids.shape[1], PIECE_CANDIDATES):
            part = slice(start, start + PIECE_CANDIDATES)
            yield self.ids[row, part].tolist(), _json_values(self.values[row, part])

    def entries(self) -> Iterator[bytes]:
        """A JSON list with an object per token, in pieces."""
        names = self.names
        separator = b"["
        if self.unscored is not None:
            first = names[self.unscored]
            yield b'[%bnull,"top_logprobs":null}' % first.prefix
            separator = b","
        for row in range(len(self.ids)) if self.wide else ():
            yield separator
            yield from self._wide_entry(row)
            separator = b","
        step = max(1, PIECE_CANDIDATES // self.ids.shape[1])
        for start in () if self.wide else range(0, len(self.ids), step):
            part = slice(start, start + step)
            yield separator + self._entries(self.ids[part], self.values[part])
            separator = b","
        yield b"[]" if separator == b"[" else b"]"

    def _entries(self, ids: I32, values: F32) -> bytes:
        """The objects of some tokens, at least one."""
        names, width = self.names, ids.shape[1]
        if ids.size >= MIN_BY_COLUMNS:
            [joined] = join_items((ItemKind.OBJECT,), names, ids, values)
            return joined
        texts = _json_values(values.ravel())
        if width == 1:
            pairs = zip(ids.ravel().tolist(), texts, strict=True)
            spelled = [names[token].prefix + value for token, value in pairs]
            return b',"top_logprobs":[]},'.join(spelled) + b',"top_logprobs":[]}'
        entries = []
        for row, start in zip(ids.tolist(), range(0, len(texts), width), strict=True):
            pairs = zip(row, texts[start : start + width], strict=True)
            own, *others = [names[token].prefix + value for token, value in pairs if token >= 0]
            tops = b"{%b}" % b"},".join(others)[1:] if others else b""
            entries.append(b'%b,"top_logprobs":[%b]}' % (own, tops))
        return b",".join(entries)

    def _wide_entry(self, row: int) -> Iterator[bytes]:
        names, separator = self.names, b""
        for number, (ids, values) in enumerate(self.slices(row)):
            given = [(names[token], value) for token, value in zip(ids, values, strict=True) if token >= 0]
            shown = [b"%b%b}" % (name.prefix, value) for name, value in given]
            if number == 0:
                yield shown.pop(0)[:-1] + b',"top_logprobs":['
            if shown:
                yield separator + b",".join(shown)
                separator = b","
        yield b"]}"

    def columns(self) -> Iterator[tuple[list[int], bytes, bytes, bytes]]:
        """Of consecutive tokens that are not wide, in pieces: places in the choice's text; logprobs, texts,
        and logprobs by text of all candidates, each as a list's JSON without the brackets."""
        if self.unscored is not None:
            yield self.places.next((self.unscored,)), b"null", self.names[self.unscored].quoted, b"null"
        step = max(1, PIECE_CANDIDATES // self.ids.shape[1])
        for start in range(0, len(self.ids), step):
            ids, values = self.ids[start : start + step], self.values[start : start + step]
            places = self.places.next(ids[:, 0].tolist())
            own, spelled, by_text = self._lists(ids, values)
            yield places, own, spelled, by_text

    def _lists(self, ids: I32, values: F32) -> Sequence[bytes]:
        """Logprobs, texts, and logprobs by text, of some tokens."""
        if ids.size >= MIN_BY_COLUMNS:
            return join_items((ItemKind.LOGPROB, ItemKind.TEXT, ItemKind.BY_TEXT), self.names, ids, values)
        names, texts, width = self.names, _json_values(values.ravel()), ids.shape[1]
        quoted = [names[token].quoted if token >= 0 else b"" for token in ids.ravel().tolist()]
        own, spelled = texts[::width], quoted[::width]
        if width == 1:
            by_text = [b"%b:%b" % pair for pair in zip(spelled, own, strict=True)]
        else:
            pairs = list(zip(quoted, texts, strict=True))
            rows = (dict(filter(itemgetter(0), pairs[at : at + width])) for at in range(0, len(pairs), width))
            by_text = [b",".join([b"%b:%b" % pair for pair in row.items()]) for row in rows]
        return b",".join(own), b",".join(spelled), b"{%b}" % b"},{".join(by_text)

    def text_offsets(self) -> Iterator[list[int]]:
        """Where in the choice's text each token begins, in characters, in pieces."""
        if self.unscored is not None:
            yield self.places.next((self.unscored,))
        for start in range(0, len(self.ids), PIECE_CANDIDATES):
            yield self.places.next(self.ids[start : start + PIECE_CANDIDATES, 0].tolist())


class KeptLogprobs:
    """Logprobs of consecutive tokens of a choice that came in parts, as columns."""

    __slots__ = ("_columns", "_first")

    def __init__(self) -> None:
        self._first: TokenLogprobs | None = None
        self._columns = _Columns(1)

    def add(self, logprobs: TokenLogprobs) -> None:
        """Add the next tokens; all have as many candidates."""
        if self._first is None:
            self._first, self._columns = logprobs, _Columns(logprobs.ids.shape[1])
        self._columns.add(logprobs.ids, logprobs.values)

    @property
    def candidates(self) -> int:
        """How many there are of all tokens."""
        return len(self._columns) * self._columns.width

    def entries(self) -> Iterator[bytes]:
        """A JSON list with an object per token, in pieces."""
        if self._first is None:
            return iter((b"[]",))
        ids, values = self._columns.arrays()
        return self._first._replace(ids=ids, values=values).entries()


class LogprobCollector:
    """Logprobs of one choice that were not sent yet. ``alternatives``: number of candidates per token in
    addition to the sampled one."""

    __slots__ = ("_alternatives", "_columns", "_echo", "_names", "places")

    def __init__(
        self,
        names: TokenNames,
        echo: PromptLogprobFormatter | None = None,
        *,
        alternatives: int,
        places: TextPlaces | None = None,
    ) -> None:
        """``echo``: the prompt whose tokens precede those of the output. ``places``: of all tokens in the
        text, by default one in which every token is spelled."""
        self._names = names
        self._echo = echo
        self._alternatives = alternatives
        self.places = places or TextPlaces(names.table)
        self._columns = _Columns(1 + alternatives)

    def add(self, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """Add a row's tokens; entries of ``logprobs`` beyond them are ignored."""
        if logprobs is not None:
            ids, values, offsets = logprobs.ids, logprobs.values, logprobs.token
            if len(offsets) and offsets[-1] >= len(tokens):
                kept = offsets < len(tokens)
                ids, values, offsets = ids[kept], values[kept], offsets[kept]
            if self._columns.width > ENTRY_CANDIDATES:
                ids, values = _joined(ids, values, offsets, self._columns.width)
            elif len(ids) > len(tokens):
                raise InvalidOutputError(INVALID_LOGPROBS, "several entries of logprobs for one token")
            self._columns.add(ids, values)

    def __len__(self) -> int:
        """Tokens with logprobs that were not taken, those of an echoed prompt excluded."""
        return len(self._columns)

    @property
    def empty(self) -> bool:
        """Whether :meth:`take` has nothing to take."""
        return self._echo is None and not len(self._columns)

    def take(self) -> TokenLogprobs | None:
        """The tokens added since the last call; None if there are none."""
        if self.empty:
            return None
        ids, values = self._columns.take_columns()
        unscored = None
        if self._echo is not None:
            unscored, prompt_ids, prompt_values = self._echo.echoed(self._alternatives)
            ids, values = np.concatenate((prompt_ids, ids)), np.concatenate((prompt_values, values))
            self._echo = None
        return TokenLogprobs(self._names, ids, values, self.places, unscored)


def _joined(ids: I32, values: F32, token: I32, width: int) -> tuple[I32, F32]:
    """One row of ``width`` candidates for each token, from entries of which it may have several."""
    _, first = np.unique(token, return_index=True)
    given = ids >= 0
    count = np.add.reduceat(given.sum(axis=1), first) if len(first) else np.zeros(0, np.intp)
    inside = np.arange(width) < count[:, None]
    if (count > width).any():
        raise InvalidOutputError(INVALID_LOGPROBS, f"more than {width} candidates for one token")
    all_ids, all_values = np.full(inside.shape, -1, np.int32), np.full(inside.shape, -np.inf, np.float32)
    all_ids[inside], all_values[inside] = ids[given], values[given]
    return all_ids, all_values


Number = TypeVar("Number", np.int32, np.float32)


def _fitted(column: NDArray[Number], width: int, missing: float) -> NDArray[Number]:
    """``column`` [L, W] cut or padded to [L, width]."""
    given = column.shape[1]
    if given > width:
        return column[:, :width]
    if given < width:
        return np.pad(column, ((0, 0), (0, width - given)), constant_values=missing)
    return column


def _pieces(ids: I32, values: F32) -> Iterator[Iterator[Candidates]]:
    """Rows of candidates, in pieces of about PIECE_CANDIDATES."""
    width = ids.shape[1]
    step = max(1, PIECE_CANDIDATES // width)
    for start in range(0, len(ids), step):
        texts = _json_values(values[start : start + step].ravel())
        rows = ids[start : start + step].tolist()
        yield zip(rows, [texts[at : at + width] for at in range(0, len(texts), width)], strict=True)


def _json_values(values: F32) -> list[bytes]:
    """JSON of each of some logprobs, at least one."""
    finite = np.maximum(values, np.float32(MIN_LOGPROB))
    return orjson.dumps(finite, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
