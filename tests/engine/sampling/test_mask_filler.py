"""A slow grammar is given up after its allowance; masks of others are computed in the same call."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from penstock.engine.sampling import mask_filler
from penstock.engine.sampling.grammar_compiler import Compilation
from penstock.engine.sampling.mask_filler import MaskFiller, Row
from tests.engine.support import byte_level_tokenizer

SLOW_S = 0.05


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(byte_level_tokenizer().to_str())


class Clock:
    """Goes on with slow masks alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(mask_filler, "time", made)
    return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> set[int]:
    """Slots whose masks take SLOW_S."""
    slots: set[int] = set()
    fill, fill_part = mask_filler.fill_next_token_bitmask, mask_filler.fill_next_token_bitmask_par

    def slow_fill(matcher: LLMatcher, masks: np.ndarray, slot: int) -> None:
        clock.now += SLOW_S * (slot in slots)
        fill(matcher, masks, slot)

    def slow_part(executor: LLExecutor, work: list[tuple[LLMatcher, int]], masks: np.ndarray) -> None:
        clock.now += SLOW_S * sum(slot in slots for _, slot in work)
        fill_part(executor, work, masks)

    monkeypatch.setattr(mask_filler, "fill_next_token_bitmask", slow_fill)
    monkeypatch.setattr(mask_filler, "fill_next_token_bitmask_par", slow_part)
    return slots


def rows_of(tokenizer: LLTokenizer, letters: str) -> tuple[list[Row], dict[str, Compilation]]:
    """A row per letter, of a grammar that allows this letter alone."""
    compilations = {letter: Compilation(letter, 0, 1, 0.0) for letter in letters}
    rows = [
        Row(LLMatcher(tokenizer, LLMatcher.grammar_from_regex(letter)), slot, compilations[letter])
        for slot, letter in enumerate(letters)
    ]
    return rows, compilations


def allowed(masks: np.ndarray, slot: int) -> int:
    return int(np.bitwise_count(masks[slot].view(np.uint32)).sum())


def test_one_slow_grammar_among_others(tokenizer: LLTokenizer, slow: set[int], clock: Clock) -> None:
    rows, compilations = rows_of(tokenizer, "ab" * 32)
    slow.update(row.mask for row in rows if row.compilation is compilations["a"])
    masks = np.zeros((64, -(-tokenizer.vocab_size // 32)), np.int32)
    filler = MaskFiller(masks, LLExecutor())
    filler.fill(rows)
    assert compilations["b"].error is None
    assert compilations["a"].error is not None
    assert "too ambiguous" in str(compilations["a"].error)
    assert clock.now < mask_filler.ALLOWANCE_S + 4 * SLOW_S, "not 32 slow masks"
    assert all(allowed(masks, row.mask) >= 1 for row in rows if row.compilation is compilations["b"])


def test_a_few_slow_masks_are_allowed(tokenizer: LLTokenizer, slow: set[int]) -> None:
    rows, compilations = rows_of(tokenizer, "abcd" * 16)
    slow.update({0, 1, 2, 3})
    masks = np.zeros((64, -(-tokenizer.vocab_size // 32)), np.int32)
    filler = MaskFiller(masks, LLExecutor())
    filler.fill(rows)
    slow.clear()
    for _ in range(3):
        filler.fill(rows)
    assert all(compilation.error is None for compilation in compilations.values())
    assert all(allowed(masks, row.mask) >= 1 for row in rows)


def test_slow_masks_now_and_then_are_allowed_for_ever(tokenizer: LLTokenizer, slow: set[int]) -> None:
    """Popular grammars are used for days; the average counts."""
    rows, compilations = rows_of(tokenizer, "aaaa")
    masks = np.zeros((4, -(-tokenizer.vocab_size // 32)), np.int32)
    filler = MaskFiller(masks, LLExecutor())
    for _ in range(12):
        slow.add(0)
        filler.fill(rows)
        filler.fill(rows)
        slow.clear()
        for _ in range(15):
            filler.fill(rows)
    assert compilations["a"].error is None
    slow.update(range(4))
    for _ in range(5):
        filler.fill(rows)
    assert compilations["a"].error is not None
