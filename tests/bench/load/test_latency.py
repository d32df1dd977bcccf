"""Latencies from the columns of a log, against the plain way over lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.load.latency import Latency, ReadLog

Step = tuple[int, int]  # connection, events of a read; 0 starts a request on it


def record(batches: list[list[Step]], failed: list[int]) -> tuple[ReadLog, list[list[float]]]:
    """A log of batches, one second apart, and the times of events per request, its start first."""
    log, times, current = ReadLog(), [], {}
    clock = itertools.count(0.25)
    for number, batch in enumerate(batches, 1):
        for connection, events in batch:
            if events == 0 or connection not in current:
                start = number - 1 + next(clock) / 1000
                current[connection] = log.start(connection, start)
                times.append([start])
            else:
                log.entries.append(connection)
                log.counts.append(events - 1)  # 0: a read of a head alone
                times[current[connection]] += [float(number)] * (events - 1)
        log.end_batch(float(number))
    log.failed.extend(failed)
    return log, [events for number, events in enumerate(times) if number not in failed]


steps = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8), min_size=1, max_size=8
)


@given(steps, st.lists(st.integers(0, 5), max_size=2))
def test_latencies_are_those_of_each_request(batches: list[list[Step]], failed: list[int]) -> None:
    log, requests = record(batches, failed)
    to_first, between = log.latencies()
    assert sorted(to_first) == pytest.approx(
        sorted(times[1] - times[0] for times in requests if len(times) > 1)
    )
    gaps = [b - a for times in requests for a, b in itertools.pairwise(times[1:])]
    assert sorted(between) == pytest.approx(sorted(gaps))


def test_events_counts_those_of_failed_requests_too() -> None:
    log, _ = record([[(0, 0), (0, 4)], [(0, 3)]], failed=[0])
    assert log.events == 5
    assert len(log.latencies()[0]) == 0


def test_latency_is_in_milliseconds() -> None:
    latency = Latency.of(np.array([0.001, 0.002, 0.003, 0.004, 0.1]))
    assert latency == Latency(p50=3.0, p90=61.6, p99=96.16, mean=22.0, max=100.0)


def test_no_durations_have_no_latency() -> None:
    assert Latency.of(np.zeros(0)) == Latency(None, None, None, None, None)
