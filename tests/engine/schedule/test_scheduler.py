"""The scheduler and its blocks under random loads, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.schedule.scheduler import Scheduler
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams, Submit

VOCAB, MODEL_LEN, BLOCK = 50, 64, 4


def make(slots: int = 4, blocks: int = 40, budget: int = 16, **options: Any) -> Scheduler:
    table = SlotTable(slots, MODEL_LEN, [])
    tables = BlockTables(slots, blocks, BLOCK, MODEL_LEN)
    config = ServeConfig(max_num_batched_tokens=budget, **options)
    return Scheduler(table, SamplingMetadata(table, VOCAB), tables, config, lambda: 0.0)


def request(stream: int, prompt: int, output: int, priority: int = 0) -> Submit:
    tokens = np.full(prompt, 7, "<i4").tobytes()
    return Submit(stream, tokens, SamplingParams(output, stream), priority=priority)


def check(scheduler: Scheduler, batch: Batch, budget: int) -> None:
    """What must hold after every schedule."""
    blocks, table = scheduler.blocks, scheduler.table
    assert int(batch.count.sum()) <= budget
    assert len(set(batch.slots.tolist())) == len(batch)
    assert (batch.count[: batch.singles] == 1).all()
    assert (np.diff(batch.start[: batch.singles]) >= 0).all()
    given_out = [
        block
        for slot in range(table.size)
        for block in blocks.table[slot, : blocks.block_counts[slot]].tolist()
    ]
    assert NULL_BLOCK not in given_out
    assert len(set(given_out)) == blocks.blocks - blocks.free_count()
    assert (blocks.block_counts[batch.slots] * BLOCK >= batch.start + batch.count).all()


def finish_step(scheduler: Scheduler, batch: Batch) -> dict[int, FinishReason]:
    scheduler.mark_launched(batch)
    rows = scheduler.update_from_output(batch, np.full(len(batch.samples), 9, np.int32), None)
    if rows.finish is None:
        return {}
    return {int(rows.stream[row]): FinishReason(int(rows.finish[row])) for row in np.flatnonzero(rows.finish)}


loads = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=12
)


@given(loads, st.integers(1, 5), st.integers(15, 60), st.integers(1, 24), st.sets(st.integers(0, 11)))
def test_every_stream_ends_once_and_everything_is_freed(
    load: list[tuple[int, int, int]], slots: int, blocks: int, budget: int, aborted: set[int]
) -> None:
    scheduler = make(slots, blocks, budget)
    ends: dict[int, FinishReason] = {}
    pending = list(enumerate(load))
    for step in range(3000):
        while pending and pending[0][1][2] <= step:
            stream, (prompt, output, _) = pending.pop(0)
            scheduler.submit(0, request(stream, prompt, output))
        if step == 4:
            scheduler.abort(0, sorted(aborted))
        gone = scheduler.take_aborted()
        ends |= dict.fromkeys(gone.stream.tolist(), FinishReason.ABORT)
        batch = scheduler.schedule()
        check(scheduler, batch, budget)
        new = finish_step(scheduler, batch)
        assert not new.keys() & ends.keys()
        ends |= new
        if not scheduler.has_work() and not pending:
            break
    assert ends.keys() == set(range(len(load)))
    assert scheduler.blocks.free_count() == blocks
    assert scheduler.table.running() == 0


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    scheduler = make(budget=6)
    scheduler.submit(0, request(0, 2, 30))
    finish_step(scheduler, scheduler.schedule())
    scheduler.submit(0, request(1, 40, 2))
    for _ in range(8):
        batch = scheduler.schedule()
        assert 0 in scheduler.table.stream[batch.slots[: batch.singles]].tolist()
        finish_step(scheduler, batch)
    assert scheduler.streams.computed[scheduler.table.find_slot(0, 1)] >= 40


def test_more_decodes_than_a_step_computes_take_turns() -> None:
    scheduler = make(slots=4, budget=2)
    for stream in range(4):
        scheduler.submit(0, request(stream, 1, 10))
    tokens = np.zeros(4, int)
    for _ in range(20):
        batch = scheduler.schedule()
        streams = scheduler.table.stream[batch.slots]
        tokens[streams] += 1
        finish_step(scheduler, batch)
    assert tokens.max() - tokens.min() <= 1


def test_the_stream_admitted_last_is_preempted_and_comes_back() -> None:
    scheduler = make(slots=2, blocks=10, budget=32)
    for stream in range(2):
        scheduler.submit(0, request(stream, 16, 20))
    ends: dict[int, FinishReason] = {}
    order: list[int] = []
    for _ in range(200):
        batch = scheduler.schedule()
        new = finish_step(scheduler, batch)
        order += new
        ends |= new
        if not scheduler.has_work():
            break
    assert scheduler.streams.preemptions > 0
    assert order == [0, 1]
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("submitted", "message"),
    [
        (request(0, MODEL_LEN, 1), "leave no room"),
        (request(0, 40, 20), "do not fit the KV cache"),
        (Submit(0, np.array([VOCAB], "<i4").tobytes(), SamplingParams(1, 0)), "token id 50"),
        (Submit(0, np.array([1, 2], "<i4").tobytes(), SamplingParams(1, 0), resumed=1), "more than 1"),
    ],
)
def test_what_could_never_run_is_refused(submitted: Submit, message: str) -> None:
    scheduler = make(blocks=10)
    with pytest.raises(RequestRejected, match=message):
        scheduler.submit(0, submitted)
    assert not scheduler.has_work()


def test_failing_all_streams_leaves_nothing() -> None:
    scheduler = make(slots=2)
    for stream in range(4):
        scheduler.submit(0, request(stream, 3, 5))
    finish_step(scheduler, scheduler.schedule())
    scheduler.abort(0, [3])
    rows = scheduler.fail_all("engine_error", "gone")
    assert {failure.stream for failure in rows.failed} == {0, 1, 2, 3}
    assert not scheduler.has_work()
    assert scheduler.blocks.free_count() == 40


# -- priorities


def test_the_most_important_request_gets_the_next_slot() -> None:
    scheduler = make(slots=1, scheduling_policy="priority")
    for stream, priority in enumerate((5, 3, 4)):
        scheduler.submit(0, request(stream, 3, 2, priority))
    order: list[int] = []
    while scheduler.has_work():
        order += finish_step(scheduler, scheduler.schedule())
    assert order == [1, 2, 0]


def test_the_least_important_stream_is_preempted_though_it_came_first() -> None:
    scheduler = make(slots=2, blocks=10, budget=32, scheduling_policy="priority")
    scheduler.submit(0, request(0, 16, 20, priority=1))
    finish_step(scheduler, scheduler.schedule())
    scheduler.submit(0, request(1, 16, 20, priority=0))
    order: list[int] = []
    while scheduler.has_work():
        order += finish_step(scheduler, scheduler.schedule())
    assert scheduler.streams.preemptions > 0
    assert order == [1, 0]


def test_a_newcomer_that_is_more_important_comes_before_a_preempted_stream() -> None:
    scheduler = make(slots=3, blocks=10, budget=32, scheduling_policy="priority")
    for stream, priority in enumerate((0, 5)):
        scheduler.submit(0, request(stream, 16, 20, priority))
    while not scheduler.streams.preemptions:
        finish_step(scheduler, scheduler.schedule())
    scheduler.submit(0, request(2, 16, 20, priority=1))
    order: list[int] = []
    while scheduler.has_work():
        order += finish_step(scheduler, scheduler.schedule())
    assert order == [0, 2, 1]


def test_a_displaced_request_ends_with_the_next_step() -> None:
    scheduler = make(slots=1, scheduling_policy="priority", max_num_queued_reqs=1)
    scheduler.submit(0, request(0, 3, 2, priority=5))
    finish_step(scheduler, scheduler.schedule())
    scheduler.submit(0, request(1, 3, 2, priority=5))
    scheduler.submit(0, request(2, 3, 2, priority=4))
    failures = scheduler.take_aborted().failed
    assert [(failure.stream, failure.code) for failure in failures] == [(1, "overloaded")]
    assert scheduler.waiting() == 1
