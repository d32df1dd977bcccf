"""The latest metrics of each worker and the sum of ended ones, as the keeper has them."""

from __future__ import annotations

import logging

import msgspec
import pytest

from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, summed
from penstock.gateway.workers import kept_metrics
from penstock.gateway.workers.kept_metrics import (
    LATEST,
    OTHERS,
    REFRESH,
    REFRESHED,
    SCRAPE,
    WAIT_S,
    MetricsKeeper,
    OthersMetrics,
)
from penstock.gateway.workers.letters import Letter, WorkerName
from penstock.metrics.snapshot import Distribution, Labels, Series, Value

OWN, SIBLING, THIRD = WorkerName(0, 0), WorkerName(1, 0), WorkerName(2, 0)
encode = msgspec.msgpack.encode


def metrics(count: float, model: str = "m") -> bytes:
    counted = [Series("c", (model,), count), Series("h", (), Distribution((1, int(count)), count))]
    return encode(WorkerMetrics(counted, [Series("g", (), count)]))


class Kept:
    """A keeper's metrics, with what it sends."""

    def __init__(self, *present: WorkerName) -> None:
        self.now = 100.0
        self.present = set(present)
        self.sent: list[tuple[WorkerName, Letter]] = []
        self.has_room = True
        self.keeper = MetricsKeeper(self.send, self.present, lambda: self.now)

    def send(self, worker: WorkerName, letter: Letter) -> bool:
        if self.has_room:
            self.sent.append((worker, letter))
        return self.has_room

    def receive(self, sender: WorkerName, topic: str, data: bytes) -> None:
        self.keeper.handlers[topic](sender, data)

    def write(self, sender: WorkerName, data: bytes) -> None:
        self.receive(sender, LATEST, data)

    def end(self, worker: WorkerName) -> None:
        self.present.discard(worker)
        self.keeper.forget(worker)

    def scrape(self, asker: WorkerName = OWN, question: bytes = b"q") -> list[tuple[WorkerName, bytes]]:
        """Workers that are asked for their metrics, and the number of the question."""
        self.sent.clear()
        self.receive(asker, SCRAPE, question)
        return [(worker, letter.data) for worker, letter in self.sent if letter.topic == REFRESH]

    def answer(self, asker: WorkerName = OWN, question: bytes = b"q") -> list[WorkerMetrics] | None:
        """What was sent for a question; None: not all yet."""
        parts = [
            msgspec.msgpack.decode(letter.data, type=OthersMetrics)
            for worker, letter in self.sent
            if worker == asker and letter.topic == OTHERS
        ]
        found = [part.metrics for part in parts if part.question == question]
        if None not in found:
            return None
        assert found.index(None) == len(found) - 1
        return [msgspec.msgpack.decode(each, type=WorkerMetrics) for each in found if each is not None]

    def totals(self) -> dict[tuple[str, Labels], Value]:
        """What a worker adds to its own."""
        for worker, number in self.scrape():
            self.receive(worker, REFRESHED, number)
        found: dict[tuple[str, Labels], Value] = {}
        for worker in self.answer() or ():
            for each in (*worker.counted, *worker.gauges):
                key = each.family, each.labels
                known = {each.labels: found[key]} if key in found else {}
                found[key] = summed(known, [each])[each.labels]
        return found


def test_what_ended_workers_counted_stays_and_their_gauges_go() -> None:
    kept = Kept(OWN)
    assert kept.totals() == {}
    kept.write(OWN, metrics(100.0))  # its reader knows it better
    kept.present.add(SIBLING)
    kept.write(SIBLING, metrics(1.0))
    kept.write(SIBLING, metrics(5.0))
    assert kept.totals() == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0), ("g", ()): 5.0}
    kept.end(SIBLING)
    assert kept.totals() == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0)}
    second = WorkerName(1, 1)
    kept.write(second, metrics(2.0))
    assert kept.totals()["c", ("m",)] == 7.0
    kept.end(second)
    kept.end(WorkerName(1, 2))  # it never sent anything
    assert kept.totals() == {("c", ("m",)): 7.0, ("h", ()): Distribution((2, 7), 7.0)}


def test_the_sum_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_metrics, "MAX_ENDED_SERIES", 3)
    kept = Kept(OWN)
    for number in range(5):
        kept.write(WorkerName(1, number), metrics(1.0, f"m{number}"))
        kept.end(WorkerName(1, number))
    assert kept.totals() == {
        ("c", ("m0",)): 1.0,
        ("c", ("m1",)): 1.0,
        ("h", ()): Distribution((5, 5), 5.0),
    }


def test_metrics_that_cannot_be_read_cost_themselves(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(OWN)
    kept.write(SIBLING, metrics(5.0))
    kept.write(THIRD, b"nonsense")
    with caplog.at_level(logging.WARNING):
        kept.end(THIRD)
    assert kept.totals()["c", ("m",)] == 5.0
    assert "metrics of worker 2.0 are lost" in caplog.text


def test_a_scrape_waits_for_the_others_and_not_for_long() -> None:
    kept = Kept(OWN, SIBLING, THIRD)
    kept.write(SIBLING, metrics(5.0))
    asked = dict(kept.scrape())
    assert asked.keys() == {SIBLING, THIRD}
    assert kept.keeper.wait_s() == WAIT_S
    kept.write(SIBLING, metrics(6.0))
    kept.receive(SIBLING, REFRESHED, asked[SIBLING])
    kept.receive(SIBLING, REFRESHED, asked[SIBLING])
    kept.receive(THIRD, REFRESHED, b"another")
    assert kept.answer() is None
    kept.now += WAIT_S / 2
    kept.keeper.answer_late()
    assert kept.answer() is None
    kept.now += WAIT_S / 2
    assert kept.keeper.wait_s() == 0.0
    kept.keeper.answer_late()
    [sibling, ended] = kept.answer() or ()
    assert (sibling.counted[0].value, ended.counted) == (6.0, [])
    assert kept.keeper.wait_s() is None
    kept.receive(THIRD, REFRESHED, asked[THIRD])  # too late


def test_a_worker_that_dies_is_not_waited_for() -> None:
    """Nor is an answer sent to one."""
    kept = Kept(OWN, SIBLING)
    kept.write(SIBLING, metrics(5.0))
    kept.scrape()
    kept.receive(SIBLING, SCRAPE, b"of the sibling")
    kept.end(SIBLING)
    [ended] = kept.answer() or ()
    assert ended.counted[0].value == 5.0
    assert kept.keeper.wait_s() is None


def test_scrapes_of_two_workers_at_a_time() -> None:
    kept = Kept(OWN, SIBLING)
    kept.write(OWN, metrics(1.0))
    kept.write(SIBLING, metrics(5.0))
    [(_, first)] = kept.scrape()
    kept.receive(SIBLING, SCRAPE, b"s")
    [(_, second)] = [(to, each.data) for to, each in kept.sent if each.topic == REFRESH and to == OWN]
    kept.receive(SIBLING, REFRESHED, first)
    kept.receive(OWN, REFRESHED, second)
    assert [each.counted[0].value for each in (kept.answer() or ())[:1]] == [5.0]
    assert [each.counted[0].value for each in (kept.answer(SIBLING, b"s") or ())[:1]] == [1.0]


def test_an_answer_for_which_there_is_no_room_is_none() -> None:
    """Its worker must not show less than there is."""
    kept = Kept(OWN)
    kept.write(SIBLING, metrics(5.0))
    kept.has_room = False
    kept.scrape()
    assert kept.answer() is None
    assert kept.keeper.wait_s() is None
