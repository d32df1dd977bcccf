"""Growth is the slope of what was sampled, and judged where there is enough of it."""

from __future__ import annotations

import pytest

from tests.soak.leaks import MIB, MIN_SPAN_S, MemorySample, growth, leaks, slope


def samples(
    mib_per_hour: float, count: int = 8, every_s: float = 60.0, objects: int | None = None
) -> list[MemorySample]:
    return [
        MemorySample(
            at_s=number * every_s,
            requests=number * 1000,
            resident_bytes=round(50 * MIB + mib_per_hour * MIB * number * every_s / 3600),
            descriptors=20 + number % 2,
            objects=None if objects is None else 40_000 + objects * number,
        )
        for number in range(count)
    ]


def test_growth_is_per_hour_and_per_1000_requests() -> None:
    found = growth("engine 0", 5, samples(30.0, objects=150))
    assert found.mib_per_hour == pytest.approx(30.0, rel=1e-3)
    assert found.kib_per_1000_requests == pytest.approx(512.0, rel=1e-3)
    assert found.objects_per_1000_requests == pytest.approx(150)
    assert (found.descriptors, found.samples, found.span_s, found.judged) == (1, 8, 420.0, True)


def test_a_sample_that_stands_out_does_not_count() -> None:
    odd = samples(0.0)
    odd[-2] = MemorySample(odd[-2].at_s, odd[-2].requests, 500 * MIB, 20)
    assert growth("engine 0", 5, odd).mib_per_hour == 0.0


@pytest.mark.parametrize(("count", "every_s"), [(4, MIN_SPAN_S), (8, 1.0)])
def test_too_little_is_not_judged(count: int, every_s: float) -> None:
    found = growth("engine 0", 5, samples(1000.0, count, every_s))
    assert not found.judged
    assert list(leaks([found], 12.0, 200.0)) == []


def test_leaks_are_named() -> None:
    grown = [growth("engine 0", 5, samples(13.0)), growth("api-server 1", 6, samples(11.0, objects=201))]
    first, second = leaks(grown, 12.0, 200.0)
    assert first.startswith("engine 0 (5) grows by 13.0 MiB an hour")
    assert second.startswith("api-server 1 (6) tracks 201 objects more")


def test_descriptors_leak_too() -> None:
    more = samples(0.0)
    more[-1] = MemorySample(more[-1].at_s, more[-1].requests, more[-1].resident_bytes, 29)
    assert list(leaks([growth("engine 0", 5, more)], 12.0, 200.0)) == [
        "engine 0 (5) has 9 descriptors more at the end"
    ]


def test_a_slope_needs_two_places() -> None:
    assert slope([(1.0, 2.0), (1.0, 9.0)]) == 0.0
