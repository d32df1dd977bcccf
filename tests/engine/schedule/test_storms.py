"""Storms: memory for far fewer streams than there are, and clients that leave all the time.

Quick versions over a model that is its cache (tests/engine/paged.py); the full ones are slow.
"""

from __future__ import annotations

import random

import pytest

from penstock.engine.schedule.scheduler import Scheduler
from penstock.wire.frames import FinishReason
from tests.engine.paged import VOCAB, Driver, make_scheduler
from tests.engine.support import Clock

MAX_PREFILL_DELAY = 3.0


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Half of them begin like others."""
    draw = random.Random(seed)
    shared = [[draw.randrange(VOCAB) for _ in range(longest // 2)] for _ in range(4)]
    return [
        draw.choice([*shared, [], [], [], []])
        + [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest // 2))]
        for _ in range(count)
    ]


def watch_prefill_limits(scheduler: Scheduler, limits: list[tuple[int, int]]) -> None:
    """Notes (prompt tokens that are allowed, those that the batch has room for) of steps with both kinds."""
    allowed = scheduler.step_cost.allowed

    def watched(most: int, decodes: int) -> int:
        limits.append((allowed(most, decodes), most))
        return limits[-1][0]

    scheduler.step_cost.allowed = watched  # type: ignore[method-assign]


def assert_prefill_was_limited(limits: list[tuple[int, int]]) -> None:
    """Neither always nor never: that depends on the durations of steps."""
    assert all(0 <= allowed <= most for allowed, most in limits)
    assert any(0 < allowed < most for allowed, most in limits)
    assert any(not allowed for allowed, most in limits)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("requests", "room_for"), [(96, 12), pytest.param(512, 64, marks=pytest.mark.slow)])
def test_preemptions_change_no_output(requests: int, room_for: int, policy: str) -> None:
    """KV cache for ``room_for`` streams of average length, slots for all requests."""
    asked = prompts(requests, seed=1)
    outputs = []
    limits: list[tuple[int, int]] = []
    for blocks in (requests * 25, room_for * 10):
        clock = Clock()
        scheduler = make_scheduler(
            requests,
            blocks,
            model_len=100,
            clock=clock,
            max_num_batched_tokens=256,
            scheduling_policy=policy,
            max_prefill_delay=MAX_PREFILL_DELAY,
        )
        watch_prefill_limits(scheduler, limits)
        driver = Driver(scheduler, clock)
        for stream, prompt in enumerate(asked):
            driver.submit(stream, prompt, 60, priority=stream % 3)
        driver.finish()
        assert set(driver.received.finish.values()) == {FinishReason.LENGTH}
        assert driver.scheduler.blocks.free_count() == blocks
        outputs.append(driver.received.tokens)
        preemptions = driver.scheduler.streams.preemptions
    assert_prefill_was_limited(limits)
    assert preemptions > requests // 10
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == requests


@pytest.mark.parametrize("requests", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_aborts_at_any_point_leave_nothing(requests: int) -> None:
    draw = random.Random(2)
    clock = Clock()
    scheduler = make_scheduler(
        24, 150, model_len=100, clock=clock, max_num_batched_tokens=64, max_prefill_delay=MAX_PREFILL_DELAY
    )
    limits: list[tuple[int, int]] = []
    watch_prefill_limits(scheduler, limits)
    driver = Driver(scheduler, clock)
    asked = prompts(requests, seed=3)
    waiting = list(range(requests))
    doomed: dict[int, int] = {}
    """Stream to the step before which it is aborted."""
    step = 0
    while waiting or scheduler.has_work():
        for _ in range(draw.randint(0, 6)):
            if waiting:
                stream = waiting.pop()
                driver.submit(
                    stream,
                    asked[stream],
                    draw.randint(1, 50),
                    salt=draw.choice([None, "a"]),
                    keep_s=draw.choice([0, 0, 60]),
                )
                doomed[stream] = step + draw.choice([0, 1, 2, 5, 20, 60])
        due = [stream for stream, when in doomed.items() if when <= step]
        for stream in due:
            del doomed[stream]
        scheduler.abort(0, due)
        driver.step()
        step += 1
    assert_prefill_was_limited(limits)
    finish = list(driver.received.finish.values())
    assert len(finish) == requests
    assert finish.count(FinishReason.ABORT) > requests // 2
    assert scheduler.blocks.free_count() == scheduler.blocks.blocks
    assert not scheduler.blocks.table.any()
    assert scheduler.table.free_count() == scheduler.table.size
    assert (scheduler.waiting(), scheduler.running()) == (0, 0)
    scheduler.prefix_cache.reset()
    assert scheduler.blocks.idle == 0
    driver.submit(requests, asked[0], 3)
    driver.finish()
    assert len(driver.received.tokens[requests]) == 3
