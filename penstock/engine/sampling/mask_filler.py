"""Computes token bitmasks of many grammars within a bound of time.

A mask takes microseconds, but an ambiguous grammar can make it take a hundred milliseconds, and all streams
of the step wait. So rows are computed in parts that grow while they are fast. After a slow part, the CPU time
of each row is measured, and a grammar that takes more than its allowance is given up, with all its streams.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.sampling.grammar_compiler import Compilation

FIRST_PART = 4
"""Rows of the first part; each part that is fast doubles the next one."""
ROW_S = 0.002
"""Time that a mask may take on average: a hundred times that of usual grammars."""
ALLOWANCE_S = 0.25
"""CPU seconds that the masks of one grammar may take beyond ROW_S each, until others took as much less: the
lexer of a large grammar grows while it is used."""


class Row(NamedTuple):
    """A matcher, and where the masks of its next token and of those after a draft go."""

    matcher: LLMatcher
    mask: int
    """Row of the first mask; those after draft tokens follow it."""
    compilation: Compilation
    draft: Sequence[int] = ()
    """Tokens that the grammar admits one after another."""


class MaskFiller:
    """Fills rows of bitmasks. Used by one thread."""

    def __init__(self, masks: NDArray[np.int32], executor: LLExecutor) -> None:
        """``masks``: int32[rows, words]."""
        self._masks = masks
        self._executor = executor
        self._processors = len(os.sched_getaffinity(0))
        self._measures = False
        """Whether a part was slow: the rows are measured until none is."""

    def fill(self, rows: Sequence[Row]) -> None:
        """Compute the masks of ``rows``. Those of grammars that it gives up, which have an ``error`` then,
        are left as they are."""
        at, size = 0, FIRST_PART
        while at < len(rows) and not self._measures:
            part = rows[at : at + size]
            at, size = at + len(part), 2 * size
            began = time.perf_counter()
            self._fill_part(part)
            elapsed_s = time.perf_counter() - began
            masks = sum(1 + len(row.draft) for row in part)
            if elapsed_s > ROW_S * (4 + -(-masks // self._processors)):
                self._measures = True
                continue
            for row in part:
                if row.compilation.slow_mask_s:
                    row.compilation.slow_mask_s = max(0.0, row.compilation.slow_mask_s - ROW_S)
        if at < len(rows):
            self._measures = self._fill_measured(rows[at:])

    def _fill_part(self, rows: Sequence[Row]) -> None:
        work = [(row.matcher, row.mask) for row in rows if not row.draft]
        if work:
            fill_next_token_bitmask_par(self._executor, work, self._masks)
        drafted = [(row.matcher, row.mask, [*row.draft]) for row in rows if row.draft]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, self._masks)

    def _fill_measured(self, rows: Sequence[Row]) -> bool:
        """Whether some row was slow."""
        slow = False
        for matcher, mask, compilation, draft in rows:
            if compilation.error is not None:
                continue
            began = time.thread_time()
            fill_next_token_bitmask(matcher, self._masks, mask)
            for index, token in enumerate(draft):
                matcher.consume_token(token)
                fill_next_token_bitmask(matcher, self._masks, mask + index + 1)
            matcher.rollback(len(draft))
            taken_s = time.thread_time() - began
            allowed_s = ROW_S * (1 + len(draft))
            slow = slow or taken_s > allowed_s
            compilation.slow_mask_s = max(0.0, compilation.slow_mask_s + taken_s - allowed_s)
            if compilation.slow_mask_s > ALLOWANCE_S:
                compilation.error = RequestRejected(
                    "structured output: the grammar is too ambiguous: a token takes more than "
                    f"{ROW_S * 1000:g} ms on average"
                )
        return slow
