"""Totals over a fleet's processes, and the format of their snapshots."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metrics import families as f
from penstock.metrics.merge import totals
from penstock.metrics.snapshot import (
    MAX_LABEL_LENGTH,
    MAX_SNAPSHOT_BYTES,
    Distribution,
    Series,
    Snapshot,
    decode_snapshot,
    encode_snapshot,
)
from tests.metrics.views import view_of

BUCKETS = len(f.ITL.bounds) + 1


def snapshot(process: int, epoch: int, sequence: int, incarnation: int = 0) -> Snapshot:
    """What process ``process`` has counted in ``epoch`` by ``sequence``: more and more."""
    labels = "m", str(process)
    counts = tuple(sequence * (bucket % 3) for bucket in range(BUCKETS))
    return Snapshot(
        f"engine {process}",
        epoch,
        sequence,
        [
            Series(f.GENERATION_TOKENS.name, labels, 10 * sequence + epoch),
            Series(f.SUCCESS.name, (*labels, "stop"), sequence // 2),
            Series(f.ITL.name, labels, Distribution(counts, 0.25 * sequence)),
            Series(f.RESTARTS.name, (f"engine {process}",), epoch),
            Series(f.GC_FREED.name, ("shared", "2"), sequence),
        ],
        incarnation,
    )


snapshots = st.builds(snapshot, st.integers(0, 2), st.integers(0, 2), st.integers(0, 20))


@given(st.lists(snapshots, max_size=12).flatmap(lambda some: st.tuples(st.just(some), st.permutations(some))))
def test_the_order_of_arrival_does_not_matter(orders: tuple[list[Snapshot], list[Snapshot]]) -> None:
    assert totals(view_of(*orders[0])) == totals(view_of(*orders[1]))


def test_a_supervisor_that_is_started_anew_counts_on() -> None:
    found = totals(view_of(snapshot(0, 2, 5, 7), snapshot(0, 0, 3, 8)))
    assert found[f.GENERATION_TOKENS.name] == {("m", "0"): 52 + 30}
    assert found[f.RESTARTS.name] == {("engine 0",): 0}


def test_counters_add_up_over_restarts_and_gauges_are_the_living_ones() -> None:
    found = totals(view_of(snapshot(0, 0, 5), snapshot(0, 1, 2), snapshot(0, 1, 1), snapshot(1, 0, 3)))
    assert found[f.GENERATION_TOKENS.name] == {("m", "0"): 50 + 21, ("m", "1"): 30}
    assert found[f.RESTARTS.name] == {("engine 0",): 1, ("engine 1",): 0}
    assert found[f.GC_FREED.name] == {("shared", "2"): 5 + 2 + 3}
    distribution = found[f.ITL.name]["m", "0"]
    assert isinstance(distribution, Distribution)
    assert distribution.counts[:3] == (0, 7, 14)
    assert math.isclose(distribution.total, 0.25 * 7)


@given(snapshots)
def test_a_snapshot_travels(sent: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(sent)) == sent


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode(["e", -1, 0, []])])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        decode_snapshot(data)


def test_families_of_another_version_are_left_out() -> None:
    kept = Series(f.STEPS.name, ("m", "0"), 3)
    others = [
        Series("penstock:of_tomorrow", ("m",), 1.0),
        Series(f.STEPS.name, ("m", "0", "more"), 3),
        Series(f.STEPS.name, ("m", "0"), Distribution((1,), 1.0)),
        Series(f.ITL.name, ("m", "0"), 3.0),
        Series(f.ITL.name, ("m", "0"), Distribution((1, 2), 1.0)),
    ]
    data = encode_snapshot(Snapshot("engine 0", 0, 1, [*others, kept]))
    assert decode_snapshot(data).series == [kept]


@pytest.mark.parametrize(
    "wrong",
    [
        Series(f.GENERATION_TOKENS.name, ("m", "1"), math.nan),
        Series(f.GENERATION_TOKENS.name, ("m", "1"), math.inf),
        Series(f.GENERATION_TOKENS.name, ("m" * (MAX_LABEL_LENGTH + 1), "1"), 1.0),
        Series(f.ITL.name, ("m", "1"), Distribution((-1,) * BUCKETS, 1.0)),
        Series(f.ITL.name, ("m", "1"), Distribution((1,) * BUCKETS, math.nan)),
    ],
)
def test_series_that_would_spoil_the_sums_are_left_out(wrong: Series) -> None:
    sound = snapshot(1, 0, 3)
    spoiled = msgspec.structs.replace(sound, series=[*sound.series, wrong])
    assert decode_snapshot(encode_snapshot(spoiled)) == sound


def test_a_snapshot_is_bounded() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_SNAPSHOT_BYTES} are taken"):
        decode_snapshot(b" " * (MAX_SNAPSHOT_BYTES + 1))
