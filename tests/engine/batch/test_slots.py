"""The slot table against streams that are kept one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.base import StepRows
from penstock.engine.batch.slots import SlotTable
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams, Submit

MAX_MODEL_LEN = 24
EOS = (1, 2)
VOCABULARY = 30

Row = tuple[int, int, int, tuple[int, ...], int, int]
"""(server, stream, position, tokens, finish, cached)"""


@dataclass
class PlainStream:
    """What one stream should do, said as plainly as possible."""

    server: int
    request: Submit
    cached: int
    output: list[int] = field(default_factory=list)
    sent: int = 0
    sent_at: float = 0.0
    finish: int = 0

    def __post_init__(self) -> None:
        prompt = np.frombuffer(self.request.prompt, "<i4").tolist()
        self.prompt_only = len(prompt) - self.request.resumed
        self.output = prompt[self.prompt_only :]
        self.sent = len(self.output)

    def settle(self, token: int) -> None:
        sampling = self.request.sampling
        self.output.append(token)
        generated = len(self.output)
        if generated >= sampling.max_tokens or self.prompt_only + generated >= MAX_MODEL_LEN:
            self.finish = FinishReason.LENGTH
        if generated > sampling.min_tokens:
            if token in sampling.stop_token_ids:
                self.finish = FinishReason.STOP_TOKEN
            if token in EOS and not sampling.ignore_eos:
                self.finish = FinishReason.EOS

    def due(self, now: float) -> bool:
        held = len(self.output) - self.sent
        full = held >= self.request.interval and now - self.sent_at >= self.request.interval_ms / 1000
        return bool(self.sent == self.request.resumed or self.finish or full)

    def flush(self, now: float) -> Row:
        self.sent_at = now
        first = self.sent == self.request.resumed
        row = (
            self.server,
            self.request.stream,
            self.sent,
            tuple(self.output[self.sent :]),
            int(self.finish),
            self.cached if first else 0,
        )
        self.sent = len(self.output)
        return row


def rows_of(rows: StepRows) -> set[Row]:
    count = [1] * len(rows.server) if rows.count is None else rows.count.tolist()
    ends = np.cumsum(count).tolist()
    assert (ends[-1] if ends else 0) == len(rows.tokens)
    return {
        (
            int(rows.server[at]),
            int(rows.stream[at]),
            int(rows.position[at]),
            tuple(rows.tokens[ends[at] - count[at] : ends[at]].tolist()),
            0 if rows.finish is None else int(rows.finish[at]),
            0 if rows.cached is None else int(rows.cached[at]),
        )
        for at in range(len(rows.server))
    }


def draw_request(rng: random.Random, stream: int) -> Submit:
    length = rng.randint(1, MAX_MODEL_LEN - 2)
    resumed = rng.choice([0, 0, rng.randint(0, length - 1)])
    stop_ids = rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 3, 12]))
    sampling = SamplingParams(
        max_tokens=resumed + rng.randint(1, 20),
        seed=0,
        min_tokens=rng.choice([0, 0, rng.randint(0, 12)]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(stop_ids),
    )
    prompt = np.array([rng.randrange(VOCABULARY) for _ in range(length)], "<i4").tobytes()
    interval, interval_ms = rng.choice([1, 1, 2, 5, 100]), rng.choice([0, 0, 0, 30, 60_000])
    return Submit(stream, prompt, sampling, interval, resumed=resumed, interval_ms=interval_ms)


class Race:
    """A table and plain streams that get the same tokens."""

    def __init__(self, seed: int, slots: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.table = SlotTable(slots, MAX_MODEL_LEN, EOS, lambda: self.now)
        self.plain: dict[int, PlainStream] = {}
        self.next_stream = 0

    def start(self) -> None:
        server, request = self.rng.randrange(3), draw_request(self.rng, self.next_stream)
        self.next_stream += 1
        slot = self.table.allocate(server, request)
        assert slot not in self.plain
        self.plain[slot] = PlainStream(server, request, self.rng.choice([0, 16]))
        self.table.cached[slot] = self.plain[slot].cached
        assert self.table.find_slot(server, request.stream) == slot

    def step(self) -> None:
        """Some of the slots get a token, in any order; some are aborted instead."""
        self.now += 0.01
        running = sorted(self.plain)
        self.rng.shuffle(running)
        running = running[self.rng.choice([0, len(running) // 2]) :]
        aborted = {slot for slot in running if self.rng.random() < 0.05}
        stepping = [slot for slot in running if slot not in aborted]
        tokens = [self.rng.randrange(VOCABULARY) for _ in stepping]
        slots = np.array(stepping, np.intp)
        finish = self.table.append_and_check_stop(slots, np.array(tokens, np.int32))
        for slot, token in zip(stepping, tokens, strict=True):
            self.plain[slot].settle(token)
        for slot in aborted:
            self.plain[slot].finish = FinishReason.ABORT
        slots = np.concatenate([slots, np.array(sorted(aborted), np.intp)])
        finish = np.concatenate([finish, np.full(len(aborted), FinishReason.ABORT, np.int8)])
        assert finish.dtype == np.int8
        assert finish.tolist() == [self.plain[int(slot)].finish for slot in slots]
        due = self.table.due(slots, finish)
        assert due.tolist() == [self.plain[int(slot)].due(self.now) for slot in slots]
        rows = rows_of(self.table.rows(slots, finish))
        due_slots = [slot for slot in running if self.plain[slot].due(self.now)]
        assert rows == {self.plain[slot].flush(self.now) for slot in due_slots}
        for slot in slots[finish != 0].tolist():
            self.table.release(slot)
            del self.plain[slot]

    def finish_all(self) -> None:
        rows = self.table.fail_all("engine_error", "gone")
        failures = {(failure.server, failure.stream, failure.position) for failure in rows.failed}
        assert len(rows.failed) == len(self.plain)
        assert failures == {
            (plain.server, plain.request.stream, len(plain.output)) for plain in self.plain.values()
        }
        assert rows_of(rows) == {
            plain.flush(self.now) for plain in self.plain.values() if plain.sent < len(plain.output)
        }
        assert self.table.running() == 0


@settings(max_examples=150)
@given(st.integers(0, 1 << 32), st.integers(1, 12), st.integers(1, 60))
def test_a_table_does_what_its_streams_would_do(seed: int, slots: int, steps: int) -> None:
    race = Race(seed, slots)
    for _ in range(steps):
        while race.table.free_count() and race.rng.random() < 0.6:
            race.start()
        assert race.table.running() == len(race.plain)
        race.step()
    race.finish_all()


def submit(stream: int, max_tokens: int = 10, stop_ids: tuple[int, ...] = (), interval: int = 1) -> Submit:
    prompt = np.array([5, 6, 7], "<i4").tobytes()
    return Submit(stream, prompt, SamplingParams(max_tokens, 0, stop_token_ids=stop_ids), interval)


def test_a_slot_forgets_the_stop_ids_of_its_last_stream() -> None:
    table = SlotTable(1, 100, EOS)
    for stop_ids in [(10,), tuple(range(10, 21))]:
        table.release(table.allocate(0, submit(1, stop_ids=stop_ids)))
        slot = np.array([table.allocate(0, submit(2, stop_ids=(29,)))], np.intp)
        for token in stop_ids:
            assert table.append_and_check_stop(slot, np.array([token], np.int32)).tolist() in (
                [0],
                [FinishReason.LENGTH],
            )
        table.release(int(slot[0]))


def test_plain_rows_leave_columns_out() -> None:
    table = SlotTable(4, 100, EOS)
    slots = np.array([table.allocate(0, submit(stream)) for stream in range(4)], np.intp)
    rows = table.rows(slots, table.append_and_check_stop(slots, np.array([10, 11, 12, 13], np.int32)))
    assert (rows.count, rows.finish, rows.cached, rows.logprobs) == (None, None, None, None)
    assert rows.tokens.tolist() == [10, 11, 12, 13]


def test_a_step_without_rows_that_are_due() -> None:
    table = SlotTable(1, 100, EOS)
    slots = np.array([table.allocate(0, submit(1, interval=3))], np.intp)
    for step, rows in enumerate([1, 0, 0, 1, 0]):
        finish = table.append_and_check_stop(slots, np.array([10 + step], np.int32))
        assert len(table.rows(slots, finish).server) == rows


def test_rows_are_so_far_apart_and_no_token_waits_longer() -> None:
    now = [0.0]
    table = SlotTable(2, 100, EOS, lambda: now[0])
    timed = Submit(1, submit(1).prompt, SamplingParams(12, 0), interval_ms=25)
    slots = np.array([table.allocate(0, timed), table.allocate(0, submit(2, 12))], np.intp)
    sent = []
    for _ in range(12):
        now[0] += 0.01
        rows = table.rows(slots, table.append_and_check_stop(slots, np.array([10, 10], np.int32)))
        count = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        sent.append({int(stream): int(tokens) for stream, tokens in zip(rows.stream, count, strict=True)})
    assert [step.get(1, 0) for step in sent] == [1, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 2]
    assert all(step[2] == 1 for step in sent)


def test_a_slot_forgets_the_pace_of_its_last_stream() -> None:
    table = SlotTable(1, 100, EOS, lambda: 1.0)
    timed = Submit(1, submit(1).prompt, SamplingParams(5, 0), interval_ms=60_000)
    table.release(table.allocate(0, timed))
    slots = np.array([table.allocate(0, submit(2))], np.intp)
    for _ in range(3):
        finish = table.append_and_check_stop(slots, np.array([10], np.int32))
        assert len(table.rows(slots, finish).server) == 1


def test_what_a_hurried_slot_holds_is_due() -> None:
    table = SlotTable(1, 100, EOS, lambda: 1.0)
    timed = Submit(1, submit(1).prompt, SamplingParams(9, 0), interval=5, interval_ms=60_000)
    slots = np.array([table.allocate(0, timed)], np.intp)
    for _ in range(2):
        rows = table.rows(slots, table.append_and_check_stop(slots, np.array([10], np.int32)))
    assert len(rows.server) == 0
    table.flush_next(int(slots[0]))
    rows = table.rows(slots, table.append_and_check_stop(slots, np.array([11], np.int32)))
    assert rows.tokens.tolist() == [10, 11]


def test_slots_of_a_server() -> None:
    table = SlotTable(4, 100, EOS)
    slots = [table.allocate(server, submit(7)) for server in (0, 1, 1 << 20)]
    assert table.slots_of(1) == [slots[1]]
    assert table.find_slot(1, 7) == slots[1]
    assert table.find_slot(2, 7) is None
    table.release(slots[1])
    assert table.slots_of(1) == []


def test_no_slot_is_left() -> None:
    table = SlotTable(1, 100, EOS)
    table.allocate(0, submit(1))
    assert table.free_count() == 0
    with pytest.raises(IndexError):
        table.allocate(0, submit(2))


def test_what_got_a_slot_is_told_once() -> None:
    table = SlotTable(4, MAX_MODEL_LEN, EOS)
    prompt = np.array([3], "<i4").tobytes()
    assert list(table.take_admitted()) == []
    for server, stream in [(0, 7), (2, 7)]:
        table.allocate(server, Submit(stream, prompt, SamplingParams(5, 0)))
    assert list(table.take_admitted()) == [(0, 7), (2, 7)]
    assert list(table.take_admitted()) == []


def test_rows_of_long_intervals_travel_together() -> None:
    """Streams that began at different steps soon have their rows in the same steps: few frames have many."""
    interval, steps = 256, 3000
    table = SlotTable(9, 4000, EOS)
    short = table.allocate(0, submit(100, steps, interval=100))
    counts: dict[int, list[int]] = {short: []}
    late_frames = 0
    for step in range(steps - 1):
        if step % 37 == 0 and len(counts) < 9:
            counts[table.allocate(0, submit(step, steps, interval=interval))] = []
        slots = np.array(list(counts), np.intp)
        before = table.sent[slots]
        finish = table.append_and_check_stop(slots, np.full(len(slots), 10, np.int32))
        due = table.due(slots, finish)
        assert len(table.rows(slots, finish).server) == np.count_nonzero(due)
        sent = table.sent[slots] - before
        for slot, count in zip(slots[due].tolist(), sent[due].tolist(), strict=True):
            counts[slot].append(count)
        late_frames += step >= 3 * interval and bool(due[1:].any())
    assert set(counts.pop(short)) == {1, 100}, "a short interval is kept"
    for first, *others in counts.values():
        assert first == 1
        assert interval // 2 <= min(others) <= max(others) <= interval
    assert late_frames <= (steps - 3 * interval) // interval + 1
