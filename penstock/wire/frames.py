"""The token frame's format: the tokens of one step for one API server, as columns, encoded and checked.

A row is one stream's part of a step. Columns (all little-endian; R rows, T tokens):

=========  ============  ==========================================================================
stream     int32[R]      the API server's handle
position   int32[R]      index of the row's first token in its stream
count      int32[R]      tokens in the row; the column is omitted when every row has one
tokens     int32[T]      token ids, row after row
finish     int8[R]       :class:`FinishReason`; the column is omitted when no row ends its stream
cached     int32[R]      prompt tokens found in the prefix cache; omitted when every value is 0
logprobs   sparse        L entries with W candidates each, the sampled token first: ``lp_token`` int32[L]
                         (index into tokens, ascending), ``lp_ids`` int32[L*W] (-1: none), ``lp_values``
                         float32[L*W] (natural log), ``lp_rank`` int32[L] (rank of the sampled token, from
                         1). A token with more than ENTRY_CANDIDATES has several entries. ``lp_token`` is
                         omitted when every token has one entry, ``lp_ids`` as well when that has the
                         token's own id alone
prompt     sparse        P prompt tokens with W candidates each, the prompt's own first: ``pl_row`` int32[P]
                         (index of a row of their stream, ascending), ``pl_position`` int32[P] (index in the
                         prompt), ``pl_ids``, ``pl_values`` and ``pl_rank`` as with logprobs; further entries
                         of a token have the rank 0. They may come in rows without tokens, during prefill
vectors    dense         of streams whose inputs become vectors: ``vec_width`` int32[R] and ``vec_values``
                         float32, see :mod:`penstock.wire.vectors`; ``position`` and ``count`` are of inputs,
                         ``tokens`` says how many vectors each input has
=========  ============  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I8, I32
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import MAX_LISTED_LOGPROBS, FrameHeader, KVTransferParams, WireError, encode
from penstock.wire.vectors import Vectors


class FinishReason(IntEnum):
    """Why a stream ended; NONE: it continues."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    STOP_TOKEN = 3
    """The row's last token is one of the request's stop_token_ids."""
    ABORT = 4
    GRAMMAR = 5
    """The output is complete: its constraints (grammar, allowed tokens, bad words) allow no further token.
    The row may have no tokens."""


WITH_TEXT = (FinishReason.NONE, FinishReason.LENGTH, FinishReason.GRAMMAR)
"""Finish reasons of rows whose tokens are all text."""


class Column(IntEnum):
    """Ids of the columns in FrameHeader.columns."""

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
    PL_POSITION = 11
    PL_IDS = 12
    PL_VALUES = 13
    PL_RANK = 14
    VEC_WIDTH = 15
    VEC_VALUES = 16


# Plain ints: an IntEnum takes 1 microsecond to find a member by value, and is hashed by a Python function.
_STREAM, _POSITION, _COUNT, _TOKENS, _FINISH, _CACHED = map(int, tuple(Column)[:6])
_LOGPROBS = tuple(map(int, (Column.LP_TOKEN, Column.LP_IDS, Column.LP_VALUES, Column.LP_RANK)))
_LP_TOKEN, _LP_IDS, _LP_VALUES, _ = _LOGPROBS
_PROMPT = tuple(
    map(int, (Column.PL_ROW, Column.PL_POSITION, Column.PL_IDS, Column.PL_VALUES, Column.PL_RANK))
)
_VEC_WIDTH, _VEC_VALUES = int(Column.VEC_WIDTH), int(Column.VEC_VALUES)
_OF_CANDIDATES = (Column.LP_IDS, Column.LP_VALUES, Column.PL_IDS, Column.PL_VALUES)
_NOT_NEGATIVE = {
    _STREAM: "a negative stream or position",
    _POSITION: "a negative stream or position",
    _COUNT: "count does not add up to the tokens",
    _TOKENS: "a negative token id",
    _CACHED: "a negative number of cached tokens",
    _VEC_WIDTH: "vectors of a negative width",
}
"""Columns without negative numbers, and what is wrong if there is one."""
_PER_ROW = {
    _POSITION: "position",
    _COUNT: "count",
    _FINISH: "finish",
    _CACHED: "cached",
    _VEC_WIDTH: "vec_width",
}
_LAST = max(FinishReason)
MAX_CANDIDATES = 1 + MAX_LISTED_LOGPROBS
"""Maximum candidates of an entry that are taken."""

_INT32 = np.dtype("<i4")
_DTYPE: dict[int, np.dtype[Any]] = dict.fromkeys(map(int, Column), _INT32) | {
    _FINISH: np.dtype("i1"),
    int(Column.LP_VALUES): np.dtype("<f4"),
    int(Column.PL_VALUES): np.dtype("<f4"),
    _VEC_VALUES: np.dtype("<f4"),
}


class TokenFrame(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """Rows of one step, or of several merged ones, for one API server. The module lists the columns.

    Not a dataclass, whose ``__init__`` takes four times as long.
    """

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
    kv_used: float = 0.0
    prompt: PromptLogprobs | None = None
    accepted: int = 0
    """Submits that the engine has taken from the API server's connection so far."""
    kv_transfer_params: dict[int, KVTransferParams] | None = None
    """Parameters by stream, for streams that end in this frame."""
    weights: int = 0
    """Generation of the weights with which all tokens were computed."""
    vectors: Vectors | None = None

    @property
    def rows(self) -> int:
        return len(self.stream)

    def counts(self) -> I32:
        """int32[R]: tokens per row."""
        return np.ones(len(self.stream), np.int32) if self.count is None else self.count


def encode_frame(frame: TokenFrame) -> list[bytes]:
    """The two parts of a frame's ZMQ message."""
    columns: list[tuple[int, NDArray[Any] | None]] = [
        (_STREAM, frame.stream),
        (_POSITION, frame.position),
        (_COUNT, frame.count),
        (_TOKENS, frame.tokens),
        (_CACHED, frame.cached),
    ]
    if frame.logprobs is not None:
        columns += zip(_LOGPROBS, _logprob_columns(frame.logprobs, frame.tokens), strict=True)
    if frame.prompt is not None:
        prompt = frame.prompt
        given = (prompt.row, prompt.position, prompt.ids, prompt.values, prompt.rank)
        columns += zip(_PROMPT, given, strict=True)
    if frame.vectors is not None:
        columns += ((_VEC_WIDTH, frame.vectors.width), (_VEC_VALUES, frame.vectors.values))
    columns.append((_FINISH, frame.finish))  # int8 last keeps the others aligned
    layout: list[int] = []
    parts: list[NDArray[Any]] = []
    for column, values in columns:
        if values is not None:
            layout += (column, values.size)
            parts.append(values.astype(_DTYPE[column], order="C", copy=False))
    header = FrameHeader(
        step=frame.step,
        columns=layout,
        waiting=frame.waiting,
        running=frame.running,
        kv_used=frame.kv_used,
        accepted=frame.accepted,
        kv_transfer_params=frame.kv_transfer_params,
        weights=frame.weights,
    )
    return [encode(header), b"".join(parts)]  # type: ignore[arg-type]  # contiguous arrays are buffers


def _logprob_columns(
    logprobs: Logprobs, tokens: I32
) -> tuple[I32 | None, I32 | None, NDArray[Any], NDArray[Any]]:
    """The columns, None where they are omitted. Comparing takes a fifth of the time of sending."""
    ids, columns = logprobs.ids, (logprobs.values, logprobs.rank)
    if not logprobs.cover(len(tokens)):
        return logprobs.token, ids, *columns
    has_own_alone = ids.shape[1] == 1 and ids.tobytes() == tokens.tobytes()
    return None, None if has_own_alone else ids, *columns


class _Layout(NamedTuple):
    """The columns of a frame as its header lists them: they were checked, except for the body's size."""

    columns: tuple[tuple[int, np.dtype[Any], int, int], ...]
    """Number, type, length and offset of each."""
    size: int
    """Bytes of the body."""
    unsigned: tuple[tuple[int, int], ...]
    """Start and end of the parts that have no negative number."""
    rows: int
    tokens: int
    sparse: bool
    """Whether there are logprobs or vectors."""


@lru_cache(maxsize=1024)
def _layout(numbers: tuple[int, ...]) -> _Layout:
    """The layout of ``FrameHeader.columns``. Few are in use at a time: most frames have the same columns as
    one before, and differ in the number of rows at most. Raises WireError."""
    if len(numbers) % 2:
        raise WireError("frame header: columns are not (id, length) pairs")
    columns: dict[int, tuple[int, np.dtype[Any], int, int]] = {}
    unsigned: list[tuple[int, int]] = []
    start = 0
    for number, length in zip(numbers[::2], numbers[1::2], strict=True):
        dtype = _DTYPE.get(number)
        if dtype is None:
            raise WireError(f"frame header: unknown column {number}")
        if number in columns:
            raise WireError(f"frame: column {Column(number).name} is doubled")
        columns[number] = number, dtype, length, start
        end = start + length * dtype.itemsize
        if number in _NOT_NEGATIVE:
            if unsigned and unsigned[-1][1] == start:
                start = unsigned.pop()[0]
            unsigned.append((start, end))
        start = end
    for needed in (_STREAM, _POSITION, _TOKENS):
        if needed not in columns:
            raise WireError(f"frame: no column {Column(needed).name}")
    rows, tokens = columns[_STREAM][2], columns[_TOKENS][2]
    for number, name in _PER_ROW.items():
        if number in columns and columns[number][2] != rows:
            raise WireError(f"frame: {rows} rows, but {columns[number][2]} values of {name}")
    if _COUNT not in columns and tokens != rows:
        raise WireError(f"frame: {rows} rows of one token, but {tokens} tokens")
    return _Layout(tuple(columns.values()), start, tuple(unsigned), rows, tokens, max(columns) > _CACHED)


def decode_frame(header: FrameHeader, body: bytes) -> TokenFrame:
    """Decode and check a frame. Its arrays are read-only views of ``body``.

    Raises WireError when a column is missing, unknown, repeated or cut short, or when columns disagree.
    """
    layout = _layout(tuple(header.columns))
    if len(body) != layout.size:
        raise _wrong_size(layout, body)
    columns: dict[int, NDArray[Any]] = {
        number: np.frombuffer(body, dtype, length, start) for number, dtype, length, start in layout.columns
    }
    for start, end in layout.unsigned:
        # A little-endian int32 has its sign in its last byte. This takes a fifth of the time of min() for 64
        # numbers, as much for 3,072.
        if not body[start + 3 : end : 4].isascii():
            raise _negative(columns)
    count, finish = columns.get(_COUNT), columns.get(_FINISH)
    if count is not None and int(np.add.reduce(count, dtype=np.int64)) != layout.tokens:
        raise WireError("frame: count does not add up to the tokens")
    if finish is not None and layout.rows and finish.view(np.uint8).max() > _LAST:
        raise WireError("frame: an unknown finish")
    frame = TokenFrame(
        step=header.step,
        stream=columns[_STREAM],
        position=columns[_POSITION],
        tokens=columns[_TOKENS],
        count=count,
        finish=finish,
        cached=columns.get(_CACHED),
        waiting=header.waiting,
        running=header.running,
        kv_used=header.kv_used,
        accepted=header.accepted,
        kv_transfer_params=header.kv_transfer_params,
        weights=header.weights,
    )
    if layout.sparse:
        frame.logprobs = _decode_logprobs(columns, layout.tokens)
        frame.prompt = _decode_prompt(columns, layout.rows)
        frame.vectors = _decode_vectors(columns, frame)
    return frame


def _wrong_size(layout: _Layout, body: bytes) -> WireError:
    for number, dtype, length, start in layout.columns:
        if start + length * dtype.itemsize > len(body):
            return WireError(f"frame: column {Column(number).name} is cut short")
    return WireError(f"frame: {len(body) - layout.size} bytes after the last column")


def _negative(columns: dict[int, NDArray[Any]]) -> WireError:
    wrong = next(number for number in _NOT_NEGATIVE if number in columns and (columns[number] < 0).any())
    return WireError(f"frame: {_NOT_NEGATIVE[wrong]}")


def _decode_logprobs(columns: dict[int, NDArray[Any]], tokens: int) -> Logprobs | None:
    every = _LP_TOKEN not in columns and _LP_VALUES in columns
    if every:
        columns[_LP_TOKEN] = np.arange(tokens, dtype=np.int32)
        columns.setdefault(_LP_IDS, columns[_TOKENS])
    if not _has_group(columns, _LOGPROBS):
        return None
    token, ids, values, rank = (columns[column] for column in _LOGPROBS)
    if not every:
        if not 0 <= token.min() <= token.max() < tokens:
            raise WireError("frame: logprobs of a token that is not there")
        if (token[1:] < token[:-1]).any():
            raise WireError("frame: logprobs are not in ascending order of their tokens")
    return Logprobs(token, *_candidates(len(token), ids, values), rank)


def _decode_prompt(columns: dict[int, NDArray[Any]], rows: int) -> PromptLogprobs | None:
    if not _has_group(columns, _PROMPT):
        return None
    row, position, ids, values, rank = (columns[column] for column in _PROMPT)
    if not 0 <= row.min() <= row.max() < rows or position.min() < 0:
        raise WireError("frame: prompt logprobs of a row that is not there")
    if (row[1:] < row[:-1]).any():
        raise WireError("frame: prompt logprobs are not in ascending order of their rows")
    return PromptLogprobs(row, position, *_candidates(len(row), ids, values), rank)


def _decode_vectors(columns: dict[int, NDArray[Any]], frame: TokenFrame) -> Vectors | None:
    if _VEC_WIDTH not in columns and _VEC_VALUES not in columns:
        return None
    if _VEC_WIDTH not in columns or _VEC_VALUES not in columns:
        raise WireError("frame: vector columns come together or not at all")
    vectors = Vectors(columns[_VEC_WIDTH], columns[_VEC_VALUES])
    if int(vectors.sizes(frame.tokens, frame.counts()).sum()) != len(vectors.values):
        raise WireError("frame: the vectors' width does not fit their values")
    return vectors


def _has_group(columns: dict[int, NDArray[Any]], group: Sequence[int]) -> bool:
    """Whether the columns of ``group`` are present. Raises WireError if only some are, or lengths differ."""
    if columns.keys().isdisjoint(group):
        return False
    if not columns.keys() >= set(group):
        raise WireError("frame: logprob columns come together or not at all")
    entries = {len(columns[column]) for column in group if column not in _OF_CANDIDATES}
    if len(entries) != 1 or 0 in entries:
        raise WireError("frame: logprob columns disagree in length")
    return True


def _candidates(entries: int, ids: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if len(ids) % entries or not len(ids) or len(values) != len(ids):
        raise WireError("frame: logprob columns disagree in length")
    if len(ids) > MAX_CANDIDATES * entries:
        raise WireError(
            f"frame: {len(ids) // entries} candidates per entry, at most {MAX_CANDIDATES} are taken"
        )
    return ids.reshape(entries, -1), values.reshape(entries, -1)
