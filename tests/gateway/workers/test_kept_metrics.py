"""The latest metrics of each worker and the sum of ended ones, as the keeper has them."""

from __future__ import annotations

import logging

import msgspec
import pytest

from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, summed
from penstock.gateway.workers import kept_metrics
from penstock.gateway.workers.kept_metrics import LATEST, QUESTION, MetricsKeeper, OthersMetrics
from penstock.gateway.workers.letters import Letter, WorkerName
from penstock.metrics.snapshot import Distribution, Labels, Series, Value

OWN, SIBLING, THIRD = WorkerName(0, 0), WorkerName(1, 0), WorkerName(2, 0)
encode = msgspec.msgpack.encode


def metrics(count: float, model: str = "m") -> bytes:
    counted = [Series("c", (model,), count), Series("h", (), Distribution((1, int(count)), count))]
    return encode(WorkerMetrics(counted, [Series("g", (), count)]))


class Kept:
    """A keeper's metrics, with what it sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[WorkerName, Letter]] = []
        self.room = 100
        self.keeper = MetricsKeeper(self.send)

    def send(self, worker: WorkerName, letter: Letter) -> bool:
        self.room -= 1
        if self.room >= 0:
            self.sent.append((worker, letter))
        return self.room >= 0

    def write(self, caller: WorkerName, data: bytes) -> None:
        self.keeper.handlers[LATEST](caller, data)

    def ask(self, worker: WorkerName = OWN) -> list[WorkerMetrics] | None:
        """What a worker is answered; None: not all."""
        self.sent.clear()
        self.keeper.handlers[QUESTION](worker, b"q")
        parts = [msgspec.msgpack.decode(letter.data, type=OthersMetrics) for _, letter in self.sent]
        assert {each.question for each in parts} <= {b"q"}
        assert {to for to, _ in self.sent} <= {worker}
        found = [part.metrics for part in parts]
        if None not in found:
            return None
        assert found.index(None) == len(found) - 1
        return [msgspec.msgpack.decode(each, type=WorkerMetrics) for each in found if each is not None]

    def totals(self) -> dict[tuple[str, Labels], Value]:
        """What a worker adds to its own."""
        found: dict[tuple[str, Labels], Value] = {}
        for worker in self.ask() or ():
            for each in (*worker.counted, *worker.gauges):
                key = each.family, each.labels
                known = {each.labels: found[key]} if key in found else {}
                found[key] = summed(known, [each])[each.labels]
        return found


def test_what_ended_workers_counted_stays_and_their_gauges_go() -> None:
    kept = Kept()
    assert kept.totals() == {}
    kept.write(OWN, metrics(100.0))  # its reader knows it better
    kept.write(SIBLING, metrics(1.0))
    kept.write(SIBLING, metrics(5.0))
    assert kept.totals() == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0), ("g", ()): 5.0}
    kept.keeper.forget(SIBLING)
    assert kept.totals() == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0)}
    second = WorkerName(1, 1)
    kept.write(second, metrics(2.0))
    assert kept.totals()["c", ("m",)] == 7.0
    kept.keeper.forget(second)
    kept.keeper.forget(WorkerName(1, 2))  # it never sent anything
    assert kept.totals() == {("c", ("m",)): 7.0, ("h", ()): Distribution((2, 7), 7.0)}


def test_the_sum_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_metrics, "MAX_ENDED_SERIES", 3)
    kept = Kept()
    for number in range(5):
        kept.write(WorkerName(1, number), metrics(1.0, f"m{number}"))
        kept.keeper.forget(WorkerName(1, number))
    assert kept.totals() == {
        ("c", ("m0",)): 1.0,
        ("c", ("m1",)): 1.0,
        ("h", ()): Distribution((5, 5), 5.0),
    }


def test_metrics_that_cannot_be_read_cost_themselves(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.write(SIBLING, metrics(5.0))
    kept.write(THIRD, b"nonsense")
    with caplog.at_level(logging.WARNING):
        kept.keeper.forget(THIRD)
    assert kept.totals()["c", ("m",)] == 5.0
    assert "metrics of worker 2.0 are lost" in caplog.text


def test_each_worker_gets_the_metrics_of_the_others() -> None:
    kept = Kept()
    kept.write(OWN, metrics(1.0))
    kept.write(SIBLING, metrics(5.0))
    assert [each.counted[0].value for each in (kept.ask() or ())[:-1]] == [5.0]
    assert [each.counted[0].value for each in (kept.ask(SIBLING) or ())[:-1]] == [1.0]


@pytest.mark.parametrize("room", range(3))
def test_an_answer_for_which_there_is_no_room_is_none(room: int) -> None:
    """Its worker must not show less than there is."""
    kept = Kept()
    kept.write(SIBLING, metrics(5.0))
    kept.room = room
    assert kept.ask() is None
