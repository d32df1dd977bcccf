"""How much prefill runs beside decodes: the estimate alone, and a scheduler under the test's clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engine.schedule.step_cost import MIXED_IN_A_ROW, StepCost
from tests.engine.paged import make_scheduler
from tests.engine.support import submit

DECODE_S, TOKEN_S, CHUNK_S = 0.010, 0.0001, 0.002


def learned(max_delay: float = 3.0, least: int = 16) -> StepCost:
    cost = StepCost(max_delay, least)
    cost.observe(1000 * TOKEN_S, 1000, 0)
    cost.observe(DECODE_S, 0, 8)
    return cost


def test_nothing_is_limited_before_anything_is_known() -> None:
    cost = StepCost(3.0, 16)
    assert cost.allowed(2048, 8) == 2048
    cost.observe(0.0, 100, 0)
    assert cost.allowed(2048, 8) == 2048


def test_a_step_that_only_decodes_comes_before_the_first_mixed_one() -> None:
    cost = StepCost(3.0, 16)
    cost.observe(0.1, 1000, 0)
    assert cost.allowed(2048, 8) == 0
    cost.observe(DECODE_S, 0, 8)
    assert cost.allowed(2048, 8) == 150


@pytest.mark.parametrize("decodes", [1, 5, 13, 100])
def test_other_numbers_of_decodes_are_measured_anew(decodes: int) -> None:
    cost = learned()
    assert cost.allowed(2048, 6) == cost.allowed(2048, 12) == 150
    assert cost.allowed(2048, decodes) == 0
    cost.observe(2 * DECODE_S, 0, decodes)
    assert cost.allowed(2048, decodes) == 300


@pytest.mark.parametrize(
    ("max_delay", "allowed"), [(0.0, 2048), (1.0, 16), (1.1, 16), (2.0, 75), (3.0, 150), (50.0, 2048)]
)
def test_the_rest_of_the_delay_goes_to_prompts(max_delay: float, allowed: int) -> None:
    assert learned(max_delay).allowed(2048, 8) == allowed


def test_prompts_take_no_longer_than_is_said_whatever_a_decode_takes() -> None:
    cost = StepCost(3.0, 1, 0.004)
    cost.observe(1000 * TOKEN_S, 1000, 0)
    cost.observe(DECODE_S, 0, 8)
    assert cost.allowed(2048, 8) == 30


def test_the_least_is_no_more_than_there_is_room_for() -> None:
    assert learned(1.0).allowed(5, 8) == 5


def test_what_a_chunk_costs_by_itself_is_learned() -> None:
    cost = learned()
    for _ in range(MIXED_IN_A_ROW):
        tokens = cost.allowed(2048, 8)
        cost.observe(DECODE_S + CHUNK_S + tokens * TOKEN_S, tokens, 8)
    cost.observe(DECODE_S, 0, 8)
    assert cost.allowed(2048, 8) == pytest.approx(130, abs=4)  # 15 ms less 2 ms, by 0.1 ms


def test_one_slow_step_changes_little() -> None:
    cost = learned()
    cost.observe(100 * DECODE_S, 0, 8)
    assert cost.allowed(2048, 8) == 165
    cost = learned()
    cost.observe(DECODE_S + 100 * 200 * TOKEN_S, 200, 8)
    assert cost.allowed(2048, 8) == 136


def test_what_became_cheaper_is_believed_sooner() -> None:
    cost = learned()
    cost.observe(DECODE_S / 2, 0, 8)
    assert cost.allowed(2048, 8) == 127


def test_the_cost_of_decodes_stays_known_under_a_flood_of_prompts() -> None:
    cost = learned()
    for _ in range(MIXED_IN_A_ROW):
        assert cost.allowed(2048, 8) > 0
        cost.observe(0.03, 200, 8)
    assert cost.allowed(2048, 8) == 0
    cost.observe(DECODE_S, 0, 8)
    assert cost.allowed(2048, 8) > 0


# -- a scheduler whose steps take a model's time


def flood(**options: Any) -> tuple[list[float], list[float], int]:
    """8 streams decode, then a prompt of 16,000 tokens comes. Returns the seconds of steps without and with
    the prompt, and how many steps it took."""
    now = [0.0]
    scheduler = make_scheduler(
        16,
        1200,
        block_size=16,
        model_len=17_000,
        clock=lambda: now[0],
        max_num_batched_tokens=2048,
        **options,
    )
    for stream in range(8):
        scheduler.submit(0, submit(stream, 10_000, prompt=[stream] * 20))
    alone: list[float] = []
    beside: list[float] = []
    for step in range(1000):
        if step == 100:
            scheduler.submit(0, submit(8, 1, prompt=list(range(50)) * 320))
        batch = scheduler.schedule()
        scheduler.mark_launched(batch)
        prompts = zip(
            batch.start[batch.singles :].tolist(), batch.count[batch.singles :].tolist(), strict=True
        )
        # a token's attention costs as much as the rest of it at position 8,000
        tokens_s = [TOKEN_S * count * (1 + start / 8000) + CHUNK_S for start, count in prompts]
        taken = DECODE_S * bool(batch.singles) + sum(tokens_s)
        now[0] += taken
        if step >= 20:
            (alone if step < 100 else beside).append(taken)
        scheduler.update_from_output(batch, np.full(len(batch.samples), 9, np.int32), None)
        if step > 100 and scheduler.running() == 8 and not scheduler.waiting():
            return alone, beside, step - 99
    raise AssertionError("the prompt was not computed in 900 steps")


def test_a_long_prompt_delays_decodes_by_what_is_allowed() -> None:
    alone, beside, steps = flood()
    assert max(alone) == DECODE_S
    assert max(beside) <= 3 * DECODE_S
    # prompts get three of five parts of the time
    assert 0.6 * sum(beside) == pytest.approx(sum(beside) - steps * DECODE_S, rel=0.1)


def test_without_a_limit_a_long_prompt_is_quick_and_decodes_are_slow() -> None:
    _, beside, steps = flood(max_prefill_delay=0.0)
    assert steps == 8
    assert max(beside) > 20 * DECODE_S


def test_prompts_alone_are_not_limited() -> None:
    scheduler = make_scheduler(model_len=4000, blocks=1000, max_num_batched_tokens=2048)
    scheduler.step_cost.observe(10.0, 1, 0)
    scheduler.step_cost.observe(0.001, 0, 1)
    scheduler.submit(0, submit(0, prompt=[1] * 3000))
    assert scheduler.schedule().count.tolist() == [2048]
