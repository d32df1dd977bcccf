"""Selects rows of a token frame, and merges consecutive frames into one with one row per stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I8, I32
from penstock.wire.frames import TokenFrame
from penstock.wire.logprobs import Logprobs, PromptLogprobs, concat_logprobs, concat_prompt_logprobs
from penstock.wire.messages import KVTransferParams, WireError
from penstock.wire.vectors import take_vectors

NOT_CONSECUTIVE = (1 << 31) - 1
"""Position of a merged row whose parts do not follow each other: a gap, a repetition, or rows after the end.
No stream has such a position, so whoever checks positions refuses the row."""


def take_rows(frame: TokenFrame, rows: NDArray[np.intp]) -> TokenFrame:
    """The frame's ``rows`` (indexes, each at most once) in that order, with its step and load."""
    finish = None if frame.finish is None else frame.finish[rows]
    cached = None if frame.cached is None else frame.cached[rows]
    gather, count = rows, None
    if frame.count is not None:
        gather, count = token_order(frame.count, rows), frame.count[rows]
    tokens = frame.tokens[gather]
    vectors = frame.vectors
    if vectors is not None:
        vectors = take_vectors(vectors, frame.tokens, frame.counts(), rows)
    logprobs = frame.logprobs
    if logprobs is not None and logprobs.cover(len(frame.tokens)):
        logprobs = logprobs.select_entries(gather, np.arange(len(gather), dtype=np.int32))
    elif logprobs is not None:
        logprobs = _taken_logprobs(logprobs, gather)
    stream = frame.stream[rows]
    return TokenFrame(
        step=frame.step,
        stream=stream,
        position=frame.position[rows],
        tokens=tokens,
        count=count,
        finish=finish if finish is not None and finish.any() else None,
        cached=cached if cached is not None and cached.any() else None,
        logprobs=logprobs,
        waiting=frame.waiting,
        running=frame.running,
        kv_used=frame.kv_used,
        prompt=None if frame.prompt is None else frame.prompt.remap_rows(_new_rows(rows, frame.rows)),
        accepted=frame.accepted,
        kv_transfer_params=_taken_params(frame.kv_transfer_params, stream),
        weights=frame.weights,
        vectors=vectors,
    )


def _taken_params(
    params: dict[int, KVTransferParams] | None, stream: I32
) -> dict[int, KVTransferParams] | None:
    if params is None:
        return None
    left = set(stream.tolist())
    return {handle: entry for handle, entry in params.items() if handle in left} or None


def _new_rows(rows: NDArray[np.intp], count: int) -> I32:
    """int32[count]: the index of each row within ``rows``, or -1."""
    new = np.full(count, -1, np.int32)
    new[rows] = np.arange(len(rows))
    return new


def _taken_logprobs(entries: Logprobs, gather: NDArray[np.intp]) -> Logprobs | None:
    """The entries of the tokens at ``gather``. Expects ``entries`` in ascending order of their tokens."""
    first = np.searchsorted(entries.token, gather)
    count = np.searchsorted(entries.token, gather, side="right") - first
    ends = np.cumsum(count)
    kept = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - count), count)
    return entries.select_entries(kept, np.repeat(np.arange(len(gather), dtype=np.int32), count))


def merge_frames(frames: Sequence[TokenFrame]) -> TokenFrame:
    """Merge consecutive frames of one engine into one frame with one row per stream, ordered by handle; a
    single frame stays as it is.

    A stream's rows are joined; its finish reason and cached count are kept. Step and load are those of the
    last frame. A row whose parts do not follow each other has the position :data:`NOT_CONSECUTIVE`. Raises
    WireError for frames of different weights, between which the engine must send StatesObserved.
    """
    return frames[0] if len(frames) == 1 else join_rows(frames)


def join_rows(frames: Sequence[TokenFrame]) -> TokenFrame:
    """:func:`merge_frames`, also of a single frame in which a stream may have several rows."""
    last = frames[-1]
    if any(frame.weights != last.weights for frame in frames):
        raise WireError("frames: other weights, but no message that says so")
    stream = np.concatenate([frame.stream for frame in frames])
    count = np.concatenate([frame.counts() for frame in frames])
    position = np.concatenate([frame.position for frame in frames])
    finish = _concat_optional([frame.finish for frame in frames], frames, dtype=np.int8)
    order = np.argsort(stream, kind="stable")
    ordered = stream[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(ordered) else order
    tokens = np.concatenate([frame.tokens for frame in frames])
    gather = token_order(count, order)
    return TokenFrame(
        step=last.step,
        stream=ordered[first],
        position=_first_positions(position[order], count[order], finish, order, first),
        tokens=tokens[gather],
        count=np.add.reduceat(count[order], first) if len(first) else count,
        finish=_reduce_optional(finish, order, first),
        cached=_reduce_optional(
            _concat_optional([frame.cached for frame in frames], frames, dtype=np.int32), order, first
        ),
        logprobs=_merge_logprobs(frames, gather),
        waiting=last.waiting,
        running=last.running,
        kv_used=last.kv_used,
        prompt=_merge_prompts(frames, order, first),
        accepted=last.accepted,
        kv_transfer_params=_merge_params(frames),
        weights=last.weights,
    )


def _merge_params(frames: Sequence[TokenFrame]) -> dict[int, KVTransferParams] | None:
    """No handle occurs twice: a stream ends once, and the API server reuses its handle only after that."""
    merged: dict[int, KVTransferParams] = {}
    for frame in frames:
        if frame.kv_transfer_params is not None:
            merged |= frame.kv_transfer_params
    return merged or None


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
    whole = concat_prompt_logprobs(shifted)
    return None if whole is None else whole.remap_rows(rows)


def token_order(count: I32, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Indexes that sort tokens by the row order ``order``, for rows with ``count`` tokens each."""
    starts = np.cumsum(count) - count
    counts = count[order]
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts[order], counts) + within


def _first_positions(
    position: I32, count: I32, finish: I8 | None, order: NDArray[np.intp], first: NDArray[np.intp]
) -> I32:
    """The position of each stream's first row, or NOT_CONSECUTIVE. ``position`` and ``count`` are ordered by
    stream, ``finish`` is not."""
    found: I32 = position[first]
    if len(first) == len(position):
        return found
    wrong = np.zeros(len(position), np.bool_)
    wrong[1:] = position[1:] != position[:-1] + count[:-1]
    if finish is not None:
        wrong[1:] |= finish[order][:-1] != 0
    wrong[first] = False
    if wrong.any():
        found[np.logical_or.reduceat(wrong, first)] = NOT_CONSECUTIVE
    return found


def _concat_optional(columns: list[Any], frames: Sequence[TokenFrame], *, dtype: Any) -> Any:
    """An optional column of all frames, 0 in the rows of those that lack it; None if all do."""
    if all(column is None for column in columns):
        return None
    filled = [
        np.zeros(frame.rows, dtype) if column is None else column
        for column, frame in zip(columns, frames, strict=True)
    ]
    return np.concatenate(filled)


def _reduce_optional(column: Any, order: NDArray[np.intp], first: NDArray[np.intp]) -> Any:
    """Per stream, the maximum of an optional column; at most one of a stream's rows is non-zero."""
    if column is None or not len(first):
        return column
    return np.maximum.reduceat(column[order], first)


def _merge_logprobs(frames: Sequence[TokenFrame], gather: NDArray[np.intp]) -> Logprobs | None:
    offset, shifted = 0, []
    for frame in frames:
        if frame.logprobs is not None:
            shifted.append(frame.logprobs.moved_by(offset))
        offset += len(frame.tokens)
    whole = concat_logprobs(shifted)
    return None if whole is None else _taken_logprobs(whole, gather)
