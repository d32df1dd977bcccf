"""The token log against lists per stream, through compactions, reused handles and merged rows."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.streaming import token_log
from penstock.streaming.token_log import TokenLog

SMALLEST = 16


def int32(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_reads_the_tokens_of_the_streams_asked_for_in_order() -> None:
    log = TokenLog()
    for handle in (0, 3, 7):
        log.open(handle)
    log.append(int32([0, 3, 7]), int32([10, 30, 70]), None)
    log.append(int32([7, 0]), int32([71, 72, 11]), int32([2, 1]))
    assert [tokens.tolist() for tokens in log.read([7, 0])] == [[70, 71, 72], [10, 11]]
    assert log.read([]) == []


def test_a_reused_handle_starts_empty() -> None:
    log = TokenLog()
    log.open(2)
    log.append(int32([2]), int32([5]), None)
    log.close(2)
    log.open(2)
    assert log.read([2])[0].tolist() == []
    log.append(int32([2]), int32([6]), None)
    assert log.read([2])[0].tolist() == [6]


def test_memory_follows_the_live_streams() -> None:
    log = TokenLog(SMALLEST)
    log.open(0)
    for handle in range(1, 2000):
        log.open(handle)
        log.append(int32([0, handle]), int32([handle, 1]), None)
        log.close(handle)
    assert log.read([0])[0].tolist() == list(range(1, 2000))
    assert 2000 <= log.capacity <= 4 * 2000
    log.close(0)
    log.open(1)
    for token in range(20_000):
        if token % 4 == 0:
            log.close(1)
            log.open(1)
        log.append(int32([1]), int32([token]), None)
    assert log.capacity == SMALLEST
    assert log.read([1])[0].tolist() == list(range(19_996, 20_000))


@patch.object(token_log, "_BLOCK", 8)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("toggle"), st.integers(0, 6)),
            st.tuples(st.just("frame"), st.dictionaries(st.integers(0, 6), st.integers(0, 9), max_size=7)),
        ),
        max_size=80,
    )
)
def test_equals_a_list_per_stream(events: list[tuple[str, int | dict[int, int]]]) -> None:
    log, expected, token = TokenLog(SMALLEST), dict[int, list[int]](), 0
    for _, event in events:
        if isinstance(event, int):
            if expected.pop(event, None) is None:
                log.open(event)
                expected[event] = []
            else:
                log.close(event)
            continue
        counts = {handle: count for handle, count in event.items() if handle in expected}
        tokens: list[int] = []
        for handle, count in counts.items():
            fresh = list(range(token, token + count))
            token += count
            expected[handle] += fresh
            tokens += fresh
        each = all(count == 1 for count in counts.values())
        log.append(int32(list(counts)), int32(tokens), None if each else int32(list(counts.values())))
    handles = sorted(expected, reverse=True)
    assert [tokens.tolist() for tokens in log.read(handles)] == [expected[handle] for handle in handles]
    assert log.capacity <= max(SMALLEST, 4 * max(1, token))
