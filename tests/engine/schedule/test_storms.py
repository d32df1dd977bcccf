"""Storms: memory for far fewer streams than there are, and clients that leave all the time.

Quick versions over a model that is its cache (tests/engine/paged.py); the full ones are slow.
"""

from __future__ import annotations

import random

import pytest

from penstock.wire.frames import FinishReason
from tests.engine.paged import VOCAB, Driver, make_scheduler


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Half of them begin like others."""
    draw = random.Random(seed)
    shared = [[draw.randrange(VOCAB) for _ in range(longest // 2)] for _ in range(4)]
    return [
        draw.choice([*shared, [], [], [], []])
        + [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest // 2))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("requests", "room_for"), [(96, 12), pytest.param(512, 64, marks=pytest.mark.slow)])
def test_preemptions_change_no_output(requests: int, room_for: int, policy: str) -> None:
    """KV cache for ``room_for`` streams of average length, slots for all requests."""
    asked = prompts(requests, seed=1)
    outputs = []
    for blocks in (requests * 25, room_for * 10):
        driver = Driver(
            make_scheduler(
                requests, blocks, model_len=100, max_num_batched_tokens=256, scheduling_policy=policy
            )
        )
        for stream, prompt in enumerate(asked):
            driver.submit(stream, prompt, 60, priority=stream % 3)
        driver.finish()
        assert set(driver.received.finish.values()) == {FinishReason.LENGTH}
        assert driver.scheduler.blocks.free_count() == blocks
        outputs.append(driver.received.tokens)
        preemptions = driver.scheduler.preemptions
    assert preemptions > requests // 10
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == requests


@pytest.mark.parametrize("requests", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_aborts_at_any_point_leave_nothing(requests: int) -> None:
    draw = random.Random(2)
    driver = Driver(make_scheduler(24, 150, model_len=100, max_num_batched_tokens=64))
    scheduler = driver.scheduler
    asked = prompts(requests, seed=3)
    waiting = list(range(requests))
    doomed: dict[int, int] = {}
    """Stream to the step before which it is aborted."""
    step = 0
    while waiting or scheduler.has_work():
        for _ in range(draw.randint(0, 6)):
            if waiting:
                stream = waiting.pop()
                driver.submit(stream, asked[stream], draw.randint(1, 50), salt=draw.choice([None, "a"]))
                doomed[stream] = step + draw.choice([0, 1, 2, 5, 20, 60])
        due = [stream for stream, when in doomed.items() if when <= step]
        for stream in due:
            del doomed[stream]
        scheduler.abort(0, due)
        driver.step()
        step += 1
    finish = list(driver.received.finish.values())
    assert len(finish) == requests
    assert finish.count(FinishReason.ABORT) > requests // 2
    assert scheduler.blocks.free_count() == scheduler.blocks.blocks
    assert not scheduler.blocks.ref_counts.any()
    assert scheduler.table.free_count() == scheduler.table.size
    assert (scheduler.waiting(), scheduler.running()) == (0, 0)
    scheduler.prefix_cache.reset()
    assert len(scheduler.blocks._idle) == 0
    driver.submit(requests, asked[0], 3)
    driver.finish()
    assert len(driver.received.tokens[requests]) == 3
