"""Logprobs leave with the row of their token, whatever streams and intervals are mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.batch.logprobs import LogprobsBuffer
from penstock.engine.batch.slots import SlotTable
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from tests.engine.support import submit

SLOTS = 5
STREAMS = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from([-1, 0, 1, 3, 127, 128, 300]), st.integers(1, 20)),
    min_size=1,
    max_size=12,
)
"""Interval, alternatives (-1: no logprobs) and length of each stream."""


def entry(stream: int, place: int, alternatives: int) -> tuple[list[int], list[float], int]:
    """What the token at ``place`` of a stream has."""
    ids = [100 * stream + place + other for other in range(alternatives + 1)]
    return ids, [-float(token) for token in ids], place + 1


class Batch:
    """Streams that run in a few slots, and what each was given."""

    def __init__(self, streams: list[tuple[int, int, int]]) -> None:
        self.table = SlotTable(SLOTS, 64, [])
        self.held = LogprobsBuffer(self.table)
        self.streams = streams
        self.waiting = list(range(len(streams)))
        self.slots: list[int] = []
        self.given: dict[int, list[Any]] = {stream: [] for stream in self.waiting}

    def step(self) -> None:
        while self.waiting and len(self.slots) < SLOTS:
            stream = self.waiting.pop(0)
            interval, _, length = self.streams[stream]
            self.slots.append(self.table.allocate(0, submit(stream, length, interval=interval)))
        slots = np.array(self.slots, np.intp)
        finish = self.table.append_and_check_stop(slots, np.zeros(len(slots), np.int32))
        logprobs = self.held.append_and_take_due(slots, self.table.due(slots, finish), self.sampled(slots))
        rows = self.table.rows(slots, finish)
        self.take(rows, logprobs)
        for slot in slots[finish != FinishReason.NONE].tolist():
            self.table.release(slot)
            self.slots.remove(slot)

    def sampled(self, slots: np.ndarray) -> Logprobs | None:
        found = []
        for row, slot in enumerate(slots.tolist()):
            stream = int(self.table.stream[slot])
            alternatives = self.streams[stream][1]
            if alternatives >= 0:
                place = int(self.table.length[slot] - self.table.base[slot]) - 1
                found.append((row, entry(stream, place, alternatives)))
        if not found:
            return None
        width = max(len(ids) for _, (ids, _, _) in found)
        ids = np.full((len(found), width), -1, np.int32)
        values = np.full((len(found), width), -np.inf, np.float32)
        for at, (_, (own, floats, _)) in enumerate(found):
            ids[at, : len(own)], values[at, : len(own)] = own, floats
        row = np.array([row for row, _ in found], np.int32)
        return Logprobs(row, ids, values, np.array([rank for _, (_, _, rank) in found], np.int32)).split()

    def take(self, rows: Any, logprobs: Logprobs | None) -> None:
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        owner = np.repeat(rows.stream, counts)
        if logprobs is None:
            return
        continues = logprobs.continues().tolist()
        for at, token in enumerate(logprobs.token.tolist()):
            ids = [id for id in logprobs.ids[at].tolist() if id >= 0]
            values = logprobs.values[at][: len(ids)].tolist()
            given = self.given[int(owner[token])]
            if continues[at]:
                given[-1][0].extend(ids)
                given[-1][1].extend(values)
            else:
                given.append((ids, values, int(logprobs.rank[at])))


@given(STREAMS)
def test_every_token_has_its_own_entry_once(streams: list[tuple[int, int, int]]) -> None:
    batch = Batch(streams)
    while batch.waiting or batch.slots:
        batch.step()
    for stream, (_, alternatives, length) in enumerate(streams):
        wanted = range(length) if alternatives >= 0 else ()
        assert batch.given[stream] == [entry(stream, place, alternatives) for place in wanted]


@given(STREAMS, st.integers(0, 30))
def test_tokens_that_are_sent_because_the_engine_breaks_have_theirs(
    streams: list[tuple[int, int, int]], steps: int
) -> None:
    batch = Batch(streams)
    for _ in range(steps):
        if batch.waiting or batch.slots:
            batch.step()
    running = {
        int(batch.table.stream[slot]): int(batch.table.length[slot] - batch.table.base[slot])
        for slot in batch.slots
    }
    wanting = np.array([streams[stream][1] >= 0 for stream in batch.table.stream.tolist()])
    rows = batch.table.fail_all("engine_error", "over", lambda slots: batch.held.take_held(slots, wanting))
    batch.take(rows, rows.logprobs)
    for stream, length in running.items():
        alternatives = streams[stream][1]
        wanted = range(length) if alternatives >= 0 else ()
        assert batch.given[stream] == [entry(stream, place, alternatives) for place in wanted]


def test_a_long_interval_takes_memory_for_what_is_held_alone() -> None:
    batch = Batch([(40, 0, 40), (1, 3, 40)])
    for _ in range(40):
        batch.step()
    assert batch.held._ids.shape[1] <= 64
    assert len(batch.given[0]) == len(batch.given[1]) == 40
