"""Concatenates the parts of a step's rows: streams that ran, were aborted, or failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from penstock.engine.base import StepRows, StreamFailure
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs, concat_logprobs, concat_prompt_logprobs
from penstock.wire.messages import KVTransferParams
from penstock.wire.vectors import Vectors

NumberT = TypeVar("NumberT", bound=np.generic)


def empty_rows() -> StepRows:
    empty = np.zeros(0, np.int32)
    return StepRows(empty, empty, empty, empty)


def aborted_rows(streams: Sequence[tuple[int, int, int]]) -> StepRows:
    """ABORT rows without tokens for streams that never ran, given as (server, stream, position)."""
    server, stream, position = np.array(streams, np.int32).reshape(-1, 3).T
    return StepRows(
        server=server,
        stream=stream,
        position=position,
        tokens=np.zeros(0, np.int32),
        count=np.zeros(len(server), np.int32),
        finish=np.full(len(server), FinishReason.ABORT, np.int8),
    )


def concat_rows(parts: Sequence[StepRows]) -> StepRows:
    """All rows of ``parts``, in order."""
    parts = [part for part in parts if len(part.stream) or part.failed]
    if not parts:
        return empty_rows()
    if len(parts) == 1:
        return parts[0]
    failed: list[StreamFailure] = [failure for part in parts for failure in part.failed]
    return StepRows(
        server=np.concatenate([part.server for part in parts]),
        stream=np.concatenate([part.stream for part in parts]),
        position=np.concatenate([part.position for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        count=_filled([part.count for part in parts], parts, np.int32(1)),
        finish=_filled([part.finish for part in parts], parts, np.int8(0)),
        cached=_filled([part.cached for part in parts], parts, np.int32(0)),
        logprobs=_concat_logprobs(parts),
        failed=failed,
        prompt=_concat_prompt_logprobs(parts),
        kv_transfer_params=_merge_transfer_params(parts),
        routed=[each for part in parts for each in part.routed],
        vectors=_concat_vectors(parts),
    )


def _filled(
    columns: list[np.ndarray[tuple[int], np.dtype[NumberT]] | None],
    parts: Sequence[StepRows],
    default: NumberT,
) -> np.ndarray[tuple[int], np.dtype[NumberT]] | None:
    """The concatenated columns, with ``default`` for the rows of parts that lack theirs; None: all do."""
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [
            np.full(len(part.stream), default) if column is None else column
            for column, part in zip(columns, parts, strict=True)
        ]
    )


def _concat_logprobs(parts: Sequence[StepRows]) -> Logprobs | None:
    offset, shifted = 0, []
    for part in parts:
        if part.logprobs is not None:
            shifted.append(part.logprobs.moved_by(offset))
        offset += len(part.tokens)
    return concat_logprobs(shifted)


def _concat_vectors(parts: Sequence[StepRows]) -> Vectors | None:
    if all(part.vectors is None for part in parts):
        return None
    given = [
        Vectors(np.zeros(len(part.stream), np.int32), np.zeros(0, np.float32))
        if part.vectors is None
        else part.vectors
        for part in parts
    ]
    width = np.concatenate([each.width for each in given])
    return Vectors(width, np.concatenate([each.values for each in given]))


def _merge_transfer_params(parts: Sequence[StepRows]) -> dict[int, dict[int, KVTransferParams]] | None:
    given: dict[int, dict[int, KVTransferParams]] = {}
    for part in parts:
        for server, params in (part.kv_transfer_params or {}).items():
            given[server] = given.get(server, {}) | params
    return given or None


def _concat_prompt_logprobs(parts: Sequence[StepRows]) -> PromptLogprobs | None:
    offset, shifted = 0, []
    for part in parts:
        if part.prompt is not None:
            shifted.append(replace(part.prompt, row=part.prompt.row + np.int32(offset)))
        offset += len(part.stream)
    return concat_prompt_logprobs(shifted)
