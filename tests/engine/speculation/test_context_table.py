"""The bounded table of what followed contexts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.speculation.context_table import CERTAIN, ContextTable

PRIORS = (0.4, 0.6, 0.8)


def columns(values: list[list[int]]) -> np.ndarray:
    return np.array(values, np.uint64)


def learn(table: ContextTable, keys: list[int], token: int, times: int = 1) -> None:
    for _ in range(times):
        table.learn(columns([[key] for key in keys]), columns([token]))


def predict(table: ContextTable, keys: list[int]) -> tuple[int, float]:
    value = int(table.predict(columns([[key] for key in keys]))[0])
    return value & 0xFFFFFFFF, (value >> 48) / CERTAIN


def spread(number: int) -> int:
    """A key of its own for each number, in a place of its own if there are enough."""
    return number * 0x9E3779B97F4A7C15 % (1 << 64)


KEYS = [spread(number) for number in (1, 2, 3)]


def test_confidence_is_the_prior_at_first_and_grows_with_hits() -> None:
    table = ContextTable(1 << 12, PRIORS)
    assert predict(table, KEYS) == (0, 0)
    learn(table, KEYS, 7)
    for size, prior in enumerate(PRIORS):
        only = [key if i == size else 5 for i, key in enumerate(KEYS)]
        assert predict(table, only) == (7, pytest.approx(prior, abs=1e-3))
    before = 0.8
    for _ in range(20):
        learn(table, KEYS, 7)
        token, confidence = predict(table, KEYS)
        assert token == 7
        assert before <= confidence < 1
        before = confidence
    assert before > 0.99


def test_a_token_that_changes_is_doubted_and_replaced() -> None:
    table = ContextTable(1 << 12, PRIORS)
    learn(table, KEYS, 7, 4)
    sure = predict(table, KEYS)[1]
    learn(table, KEYS, 8)
    token, confidence = predict(table, KEYS)
    assert token == 7
    assert confidence < sure - 0.2
    learn(table, KEYS, 8, 2)
    assert predict(table, KEYS)[0] == 8
    assert predict(table, KEYS)[1] < 0.3
    learn(table, KEYS, 8, 40)
    assert predict(table, KEYS)[1] > 0.9


def test_the_surest_context_decides() -> None:
    table = ContextTable(1 << 12, PRIORS)
    learn(table, [KEYS[0], 5, 6], 7, 15)
    learn(table, [8, 9, KEYS[2]], 3)
    assert predict(table, KEYS)[0] == 7


def test_memory_is_bounded() -> None:
    for size in (1, 100, 4096, 5000):
        table = ContextTable(size, PRIORS)
        assert table._entries.nbytes <= max(size, 32)
        assert table._entries.nbytes > size / 2


def test_entries_that_proved_themselves_outlive_others() -> None:
    table = ContextTable(32, PRIORS)  # two entries
    other = [key | 1 << 63 for key in KEYS]
    learn(table, other, 7, 8)
    learn(table, [9 | 1 << 63] * 3, 1)  # a context that comes once, in the same place
    assert predict(table, other)[0] == 7
    for number in range(2, 8):
        learn(table, [number | 1 << 63] * 3, number)
    assert predict(table, other) == (0, 0)
    assert predict(table, [7 | 1 << 63] * 3)[0] == 7


@pytest.mark.parametrize("size_bytes", [128, 256, 1 << 16])
def test_a_prediction_followed_its_context_before(size_bytes: int) -> None:
    """However few entries there are; learned one by one and together alike."""
    rng = np.random.default_rng(3)
    one, together = ContextTable(size_bytes, PRIORS), ContextTable(size_bytes, PRIORS)
    followed: dict[int, set[int]] = {}
    known = 0
    for _ in range(2000):
        contexts = [spread(int(number)) for number in rng.integers(1, 60, len(PRIORS))]
        expected = predict(together, contexts)
        value = one.predict_one(contexts)
        assert (value & 0xFFFFFFFF, (value >> 48) / CERTAIN) == expected
        if expected[1]:
            known += 1
            assert any(expected[0] in followed.get(key, ()) for key in contexts)
        token = int(rng.integers(0, 3))
        places = {key >> (64 - (len(one._entries)).bit_length() + 1) for key in contexts}
        if len(places) == len(contexts):  # else the order of writing decides
            one.learn_one(contexts, token)
            learn(together, contexts, token)
            assert (one._entries == together._entries).all()
            for key in contexts:
                followed.setdefault(key, set()).add(token)
    assert known > 100


def test_a_context_twice_at_once_leaves_an_entry_of_one() -> None:
    table = ContextTable(32, PRIORS)
    keys = columns([[1, 2, 3, 4]] * 3)
    table.learn(keys, np.array([10, 20, 30, 40], np.uint64))
    key, value = table._entries[0].tolist()
    assert value & 0xFFFFFFFF == key * 10
