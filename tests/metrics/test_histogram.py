from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.metrics import families as f
from penstock.metrics.histogram import KEPT_COLUMNS, Histogram
from penstock.metrics.snapshot import Distribution, histogram_series

BOUNDS = (1.0, 2.0, 5.0)


def naive(values: list[float]) -> list[int]:
    """Observations per bucket; a bound belongs to its bucket."""
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[sum(value > bound for bound in BOUNDS)] += 1
    return counts


observations = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 5.5, 100.0]), max_size=30)


@given(observations)
def test_a_column_is_observed_as_its_values_are(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(np.array(values))
    assert histogram.counts.tolist() == naive(values)
    assert histogram.total == sum(values)


def test_columns_that_are_kept_are_counted_when_read() -> None:
    histogram = Histogram(BOUNDS)
    for step in range(1, 2 * KEPT_COLUMNS + 2):
        histogram.observe(np.array([0.5, 3.0]))
        if step % 50 == 0:
            assert histogram.counts.tolist() == [step, 0, step, 0]
    assert histogram.total == 3.5 * step
    assert histogram.counts.tolist() == [step, 0, step, 0]


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0, 9.0]), st.integers(0, 4)), max_size=20))
def test_values_count_as_often_as_said(pairs: list[tuple[float, int]]) -> None:
    histogram, other = Histogram(BOUNDS), Histogram(BOUNDS)
    values = np.array([value for value, _ in pairs], np.float64)
    histogram.observe_times(values, np.array([times for _, times in pairs], np.int32))
    for value, times in pairs:
        other.add(value, times)
    assert histogram.counts.tolist() == other.counts.tolist()
    assert histogram.counts.tolist() == naive([value for value, times in pairs for _ in range(times)])
    assert histogram.total == other.total


def test_a_series() -> None:
    histogram = Histogram(f.ITL.bounds)
    histogram.observe(np.array([0.02, 1000.0]))
    made = histogram_series(f.ITL, ("m", "0"), histogram)
    assert (made.family, made.labels) == ("vllm:inter_token_latency_seconds", ("m", "0"))
    assert made.value == Distribution((0, 1, *[0] * (len(f.ITL.bounds) - 2), 1), 1000.02)
