"""Token frames: one step's rows for one API server, as columns.

A row is one stream's part of a step. Columns (all little-endian, R rows, T tokens):

=========  ============  ==========================================================================
stream     int32[R]      the API server's handle
position   int32[R]      index of the row's first token in its stream
count      int32[R]      tokens in the row; the column is left out when every row has one
tokens     int32[T]      token ids, row after row
finish     int8[R]       :class:`Finish`; the column is left out when no row ends its stream
cached     int32[R]      prompt tokens found in the prefix cache; left out when every value is 0
logprobs   sparse        L tokens with W candidates each, the sampled token first: ``lp_token`` int32[L]
                         (index into tokens, ascending), ``lp_ids`` int32[L*W] (-1: none), ``lp_values``
                         float32[L*W] (natural log), ``lp_rank`` int32[L] (rank of the sampled token, from 1)
prompt     sparse        P prompt tokens with W candidates each, the prompt's own first: ``pl_row`` int32[P]
                         (index of a row of their stream, ascending), ``pl_place`` int32[P] (index in the
                         prompt), ``pl_ids``, ``pl_values`` and ``pl_rank`` as with logprobs. A row without
                         tokens may carry them while the prompt is computed
=========  ============  ==========================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .messages import FrameHeader, WireError, encode

I32: TypeAlias = NDArray[np.int32]
I8: TypeAlias = NDArray[np.int8]
F32: TypeAlias = NDArray[np.float32]


class Finish(IntEnum):
    """Why a stream ended; NONE: it has not."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    STOP_TOKEN = 3
    """One of the request's stop_token_ids: the row's last token."""
    ABORT = 4
    GRAMMAR = 5
    """The request's grammar admits nothing more: the row's last token completes the output."""


class Column(IntEnum):
    STREAM = 0
    POSITION = 1
    COUNT = 2
    TOKENS = 3
    FINISH = 4
    CACHED = 5
    LP_TOKEN = 6
    LP_IDS = 7
    LP_VALUES = 8
    LP_RANK = 9
    PL_ROW = 10
    PL_PLACE = 11
    PL_IDS = 12
    PL_VALUES = 13
    PL_RANK = 14


_INT32 = np.dtype("<i4")
_DTYPE: dict[Column, np.dtype[Any]] = dict.fromkeys(Column, _INT32) | {
    Column.FINISH: np.dtype("i1"),
    Column.LP_VALUES: np.dtype("<f4"),
    Column.PL_VALUES: np.dtype("<f4"),
}


@dataclass(slots=True)
class Logprobs:
    """Sparse logprob columns of a set of tokens; see the module's table."""

    token: I32
    ids: I32
    """int32[L, W]"""
    values: F32
    """float32[L, W]"""
    rank: I32

    @property
    def width(self) -> int:
        return int(self.ids.shape[1])

    def take(self, kept: NDArray[np.intp], shifted: I32) -> "Logprobs | None":
        """The entries at ``kept`` with ``shifted`` as their token indexes."""
        if not len(kept):
            return None
        return Logprobs(shifted, self.ids[kept], self.values[kept], self.rank[kept])

    def of_tokens(self, kept: NDArray[np.bool_]) -> "Logprobs | None":
        """The entries of the tokens that are ``kept``, which are counted anew."""
        entries = np.flatnonzero(kept[self.token])
        shifted = np.cumsum(kept)[self.token[entries]] - 1
        return self.take(entries, shifted.astype(np.int32))

    def ascending(self) -> "Logprobs | None":
        """The entries in the order that the wire has them; None when there are none."""
        if not len(self.token):
            return None
        if (self.token[1:] > self.token[:-1]).all():
            return self
        order = np.argsort(self.token)
        return self.take(order, self.token[order])

    def widened(self, width: int) -> "Logprobs":
        if width == self.width:
            return self
        extra = ((0, 0), (0, width - self.width))
        return Logprobs(
            self.token,
            np.pad(self.ids, extra, constant_values=-1),
            np.pad(self.values, extra, constant_values=-np.inf),
            self.rank,
        )


@dataclass(slots=True)
class PromptLogprobs:
    """Sparse logprob columns of prompt tokens; see the module's table."""

    row: I32
    place: I32
    ids: I32
    """int32[P, W]"""
    values: F32
    """float32[P, W]"""
    rank: I32

    def part(self, start: int, end: int) -> "PromptLogprobs":
        kept = slice(start, end)
        return PromptLogprobs(
            self.row[kept], self.place[kept], self.ids[kept], self.values[kept], self.rank[kept]
        )

    def moved(self, rows: I32) -> "PromptLogprobs | None":
        """With row r at ``rows[r]``, ascending; entries of rows that go to -1 are left out."""
        row = rows[self.row]
        order = np.argsort(row, kind="stable")
        order = order[np.searchsorted(row[order], 0) :]
        if not len(order):
            return None
        return PromptLogprobs(
            row[order], self.place[order], self.ids[order], self.values[order], self.rank[order]
        )


def joined_prompts(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """One set of columns, as wide as the widest part."""
    if len(parts) < 2:
        return parts[0] if parts else None
    width = max(part.ids.shape[1] for part in parts)
    extra = [((0, 0), (0, width - part.ids.shape[1])) for part in parts]
    return PromptLogprobs(
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.place for part in parts]),
        np.concatenate(
            [np.pad(part.ids, wide, constant_values=-1) for part, wide in zip(parts, extra, strict=True)]
        ),
        np.concatenate(
            [
                np.pad(part.values, wide, constant_values=-np.inf)
                for part, wide in zip(parts, extra, strict=True)
            ]
        ),
        np.concatenate([part.rank for part in parts]),
    )


@dataclass(slots=True)
class TokenFrame:
    """Rows of one step (or of several, merged) for one API server."""

    step: int
    stream: I32
    position: I32
    tokens: I32
    count: I32 | None = None
    """None: one token per row."""
    finish: I8 | None = None
    """None: no row ends its stream."""
    cached: I32 | None = None
    logprobs: Logprobs | None = None
    waiting: int = 0
    running: int = 0
    kv_used_permille: int = 0
    prompt: PromptLogprobs | None = None
    accepted: int = 0
    """Submits that the engine has taken from the API server's connection."""

    @property
    def rows(self) -> int:
        return len(self.stream)

    def counts(self) -> I32:
        return np.ones(len(self.stream), np.int32) if self.count is None else self.count


def encode_frame(frame: TokenFrame) -> list[bytes]:
    """The two parts of a frame's ZMQ message."""
    columns: list[tuple[Column, NDArray[Any] | None]] = [
        (Column.STREAM, frame.stream),
        (Column.POSITION, frame.position),
        (Column.COUNT, frame.count),
        (Column.TOKENS, frame.tokens),
        (Column.CACHED, frame.cached),
    ]
    if frame.logprobs is not None:
        columns += [
            (Column.LP_TOKEN, frame.logprobs.token),
            (Column.LP_IDS, frame.logprobs.ids),
            (Column.LP_VALUES, frame.logprobs.values),
            (Column.LP_RANK, frame.logprobs.rank),
        ]
    if frame.prompt is not None:
        columns += [
            (Column.PL_ROW, frame.prompt.row),
            (Column.PL_PLACE, frame.prompt.place),
            (Column.PL_IDS, frame.prompt.ids),
            (Column.PL_VALUES, frame.prompt.values),
            (Column.PL_RANK, frame.prompt.rank),
        ]
    columns.append((Column.FINISH, frame.finish))  # int8 last: the others stay aligned
    layout: list[int] = []
    parts: list[bytes] = []
    for column, values in columns:
        if values is not None:
            layout += (int(column), values.size)
            parts.append(values.astype(_DTYPE[column], copy=False).tobytes())
    header = FrameHeader(
        frame.step, layout, frame.waiting, frame.running, frame.kv_used_permille, frame.accepted
    )
    return [encode(header), b"".join(parts)]


def decode_frame(header: FrameHeader, body: bytes | memoryview) -> TokenFrame:
    """The frame of a header and its column bytes, checked. Arrays are views of ``body``, read-only.

    Raises WireError when a column is missing, unknown, doubled, cut short, or the columns disagree.
    """
    layout = header.columns
    if len(layout) % 2:
        raise WireError("frame header: columns are not (id, length) pairs")
    columns: dict[Column, NDArray[Any]] = {}
    offset = 0
    for number, length in zip(layout[::2], layout[1::2], strict=True):
        try:
            column = Column(number)
        except ValueError:
            raise WireError(f"frame header: unknown column {number}") from None
        dtype = _DTYPE[column]
        end = offset + length * dtype.itemsize
        if column in columns or end > len(body):
            raise WireError(f"frame: column {column.name} is doubled or cut short")
        columns[column] = np.frombuffer(body, dtype, length, offset)
        offset = end
    if offset != len(body):
        raise WireError(f"frame: {len(body) - offset} bytes after the last column")
    try:
        stream, position, tokens = (
            columns[Column.STREAM],
            columns[Column.POSITION],
            columns[Column.TOKENS],
        )
    except KeyError as missing:
        raise WireError(f"frame: no column {missing.args[0].name}") from None
    frame = TokenFrame(
        header.step,
        stream,
        position,
        tokens,
        columns.get(Column.COUNT),
        columns.get(Column.FINISH),
        columns.get(Column.CACHED),
        _decode_logprobs(columns),
        header.waiting,
        header.running,
        header.kv_used_permille,
        _decode_prompt(columns),
        header.accepted,
    )
    _check(frame)
    return frame


def _decode_logprobs(columns: dict[Column, NDArray[Any]]) -> Logprobs | None:
    group = (Column.LP_TOKEN, Column.LP_IDS, Column.LP_VALUES, Column.LP_RANK)
    if not _together(columns, group):
        return None
    token, ids, values, rank = (columns[column] for column in group)
    return Logprobs(token, *_candidates(len(token), ids, values), rank)


def _decode_prompt(columns: dict[Column, NDArray[Any]]) -> PromptLogprobs | None:
    group = (Column.PL_ROW, Column.PL_PLACE, Column.PL_IDS, Column.PL_VALUES, Column.PL_RANK)
    if not _together(columns, group):
        return None
    row, place, ids, values, rank = (columns[column] for column in group)
    return PromptLogprobs(row, place, *_candidates(len(row), ids, values), rank)


def _together(columns: dict[Column, NDArray[Any]], group: Sequence[Column]) -> bool:
    """Whether a group of columns is there, each of them or none, as many of each kind as of the first."""
    present = [column in columns for column in group]
    if not any(present):
        return False
    if not all(present):
        raise WireError("frame: logprob columns come together or not at all")
    candidates = (Column.LP_IDS, Column.LP_VALUES, Column.PL_IDS, Column.PL_VALUES)
    entries = {len(columns[column]) for column in group if column not in candidates}
    if len(entries) != 1 or 0 in entries:
        raise WireError("frame: logprob columns disagree in length")
    return True


def _candidates(entries: int, ids: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if len(ids) % entries or not len(ids) or len(values) != len(ids):
        raise WireError("frame: logprob columns disagree in length")
    return ids.reshape(entries, -1), values.reshape(entries, -1)


def _check(frame: TokenFrame) -> None:
    rows, tokens = len(frame.stream), len(frame.tokens)
    per_row: tuple[tuple[str, NDArray[Any] | None], ...] = (
        ("position", frame.position),
        ("count", frame.count),
        ("finish", frame.finish),
        ("cached", frame.cached),
    )
    for name, column in per_row:
        if column is not None and len(column) != rows:
            raise WireError(f"frame: {rows} rows, but {len(column)} values of {name}")
    if frame.count is None:
        if tokens != rows:
            raise WireError(f"frame: {rows} rows of one token, but {tokens} tokens")
    elif rows and (frame.count.min() < 0 or int(frame.count.sum(dtype=np.int64)) != tokens):
        raise WireError("frame: count does not add up to the tokens")
    if rows and (frame.stream.min() < 0 or frame.position.min() < 0):
        raise WireError("frame: a negative stream or position")
    if tokens and frame.tokens.min() < 0:
        raise WireError("frame: a negative token id")
    if frame.finish is not None and rows and not 0 <= frame.finish.min() <= frame.finish.max() <= max(Finish):
        raise WireError("frame: an unknown finish")
    if frame.logprobs is not None:
        token = frame.logprobs.token
        if not 0 <= token.min() <= token.max() < tokens:
            raise WireError("frame: logprobs of a token that is not there")
        if (token[1:] <= token[:-1]).any():
            raise WireError("frame: logprobs are not in ascending order of their tokens")
    if frame.prompt is not None:
        row = frame.prompt.row
        if not 0 <= row.min() <= row.max() < rows or frame.prompt.place.min() < 0:
            raise WireError("frame: prompt logprobs of a row that is not there")
        if (row[1:] < row[:-1]).any():
            raise WireError("frame: prompt logprobs are not in ascending order of their rows")


def take_rows(frame: TokenFrame, rows: NDArray[np.intp]) -> TokenFrame:
    """The frame's ``rows`` (indexes, each at most once) in that order, with step and load figures."""
    finish = None if frame.finish is None else frame.finish[rows]
    cached = None if frame.cached is None else frame.cached[rows]
    if frame.count is None and frame.logprobs is None:
        count, tokens, logprobs = None, frame.tokens[rows], None
    else:
        gather = _token_order(frame.counts(), rows)
        count = None if frame.count is None else frame.count[rows]
        tokens = frame.tokens[gather]
        logprobs = None if frame.logprobs is None else _taken_logprobs(frame.logprobs, gather)
    return TokenFrame(
        frame.step,
        frame.stream[rows],
        frame.position[rows],
        tokens,
        count,
        finish if finish is not None and finish.any() else None,
        cached if cached is not None and cached.any() else None,
        logprobs,
        frame.waiting,
        frame.running,
        frame.kv_used_permille,
        None if frame.prompt is None else frame.prompt.moved(_places(rows, frame.rows)),
        frame.accepted,
    )


def _places(rows: NDArray[np.intp], count: int) -> I32:
    """Where each of ``count`` rows is among ``rows``; -1: nowhere."""
    places = np.full(count, -1, np.int32)
    places[rows] = np.arange(len(rows))
    return places


def _taken_logprobs(entries: Logprobs, gather: NDArray[np.intp]) -> Logprobs | None:
    """The entries of the tokens at ``gather``; entries are in ascending order of their tokens."""
    at = np.searchsorted(entries.token, gather)
    at[at == len(entries.token)] = 0
    present = np.flatnonzero(entries.token[at] == gather)
    return entries.take(at[present], present.astype(np.int32))


def merge(frames: Sequence[TokenFrame]) -> TokenFrame:
    """One frame with one row per stream, in order of first appearance by handle value.

    The frames are consecutive steps of one engine. A stream's rows are joined; its finish and its
    cached count are kept. Load figures and step are the last frame's.
    """
    if len(frames) == 1:
        return frames[0]
    stream = np.concatenate([frame.stream for frame in frames])
    count = np.concatenate([frame.counts() for frame in frames])
    order = np.argsort(stream, kind="stable")
    ordered = stream[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(ordered) else order
    tokens = np.concatenate([frame.tokens for frame in frames])
    gather = _token_order(count, order)
    last = frames[-1]
    return TokenFrame(
        last.step,
        ordered[first],
        np.concatenate([frame.position for frame in frames])[order][first],
        tokens[gather],
        np.add.reduceat(count[order], first) if len(first) else count,
        _reduce_optional([frame.finish for frame in frames], frames, order, first, np.int8),
        _reduce_optional([frame.cached for frame in frames], frames, order, first, np.int32),
        _merge_logprobs(frames, gather),
        last.waiting,
        last.running,
        last.kv_used_permille,
        _merge_prompts(frames, order, first),
        last.accepted,
    )


def _merge_prompts(
    frames: Sequence[TokenFrame], order: NDArray[np.intp], first: NDArray[np.intp]
) -> PromptLogprobs | None:
    if all(frame.prompt is None for frame in frames):
        return None
    starts = np.zeros(len(order), np.int32)
    starts[first] = 1
    rows = np.empty(len(order), np.int32)
    rows[order] = np.cumsum(starts) - 1
    offset, shifted = 0, []
    for frame in frames:
        if frame.prompt is not None:
            shifted.append(replace(frame.prompt, row=frame.prompt.row + np.int32(offset)))
        offset += frame.rows
    whole = joined_prompts(shifted)
    return None if whole is None else whole.moved(rows)


def _token_order(count: I32, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Indexes that bring the tokens of rows with ``count`` tokens each into the row order ``order``."""
    starts = np.cumsum(count) - count
    counts = count[order]
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts[order], counts) + within


def _reduce_optional(
    columns: list[Any],
    frames: Sequence[TokenFrame],
    order: NDArray[np.intp],
    first: NDArray[np.intp],
    dtype: Any,
) -> Any:
    """Per stream the largest value of an optional column (at most one of a stream's rows is non-zero)."""
    if all(column is None for column in columns):
        return None
    filled = [
        np.zeros(frame.rows, dtype) if column is None else column
        for column, frame in zip(columns, frames, strict=True)
    ]
    return np.maximum.reduceat(np.concatenate(filled)[order], first)


def _merge_logprobs(frames: Sequence[TokenFrame], gather: NDArray[np.intp]) -> Logprobs | None:
    present = [frame.logprobs for frame in frames if frame.logprobs is not None]
    if not present:
        return None
    width = max(entries.width for entries in present)
    placed = np.empty_like(gather)
    placed[gather] = np.arange(len(gather))
    token, offset = [], 0
    for frame in frames:
        if frame.logprobs is not None:
            token.append(placed[frame.logprobs.token + offset])
        offset += len(frame.tokens)
    indexes = np.concatenate(token).astype(np.int32)
    by_token = np.argsort(indexes)
    wide = [entries.widened(width) for entries in present]
    return Logprobs(
        indexes[by_token],
        np.concatenate([entries.ids for entries in wide])[by_token],
        np.concatenate([entries.values for entries in wide])[by_token],
        np.concatenate([entries.rank for entries in wide])[by_token],
    )
