"""Scripted replies under a limit of reasoning: what a model would write whose reasoning is ended there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.sampling.thinking_budget import Marks, reasoning_before
from penstock.wire.messages import ThinkingLimit


def cut_reasoning(reply: Sequence[int], prompt: bytes, limit: ThinkingLimit) -> Sequence[int]:
    """The tokens of ``reply`` without those of reasoning beyond the budget. What it goes on with after the
    end of its reasoning follows the forced end."""
    inside, used = reasoning_before(np.frombuffer(prompt, "<i4"), limit)
    kept: list[int] = []
    forced, at = limit.forced, 0
    while at < len(reply):
        if inside and used >= limit.budget:
            end = next((place for place in range(at, len(reply)) if _mark(limit.ends, reply, place)), None)
            kept += forced
            if end is None:
                break
            while end < len(reply) and forced and reply[end] == forced[0]:
                end, forced = end + 1, forced[1:]
            forced, at, inside = limit.again, end, False
            continue
        marks = _mark(limit.ends if inside else limit.starts, reply, at)
        size = len(marks) or 1
        used += inside and not marks
        inside ^= bool(marks)
        kept += reply[at : at + size]
        at += size
    return kept


def _mark(sequences: Sequence[Marks], reply: Sequence[int], at: int) -> Marks:
    """The mark that begins at a place; empty: none does."""
    return next((marks for marks in sequences if tuple(reply[at : at + len(marks)]) == marks), ())
