"""The length of drafts suits what steps cost, also when the first ones were slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.speculation.simulated_steps import SimulatedSteps

SEEDS = range(8)


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize(
    ("streams", "acceptance", "least"), [(1, 0.97, 7.0), (1, 0.5, 1.3), (8, 0.9, 2.0), (64, 0.9, 1.05)]
)
def test_good_drafts_pay(streams: int, acceptance: float, least: float, slow: int) -> None:
    for seed in SEEDS:
        steps = SimulatedSteps(streams, acceptance, seed=seed, slow=slow)
        steps.run(300)
        assert steps.run(700) > least


@pytest.mark.parametrize(
    ("streams", "acceptance", "costs"),
    [
        (1, 0.0, {}),
        (1, 0.02, {}),
        (8, 0.1, {}),
        (64, 0.2, {}),
        (64, 0.5, {"fixed_ms": 0.5, "token_ms": 0.1, "drafts_ms": 2.0}),
        (64, 0.8, {"fixed_ms": 0.1, "token_ms": 1.0, "drafts_ms": 0.0}),
    ],
)
@pytest.mark.parametrize("slow", [0, 3])
def test_bad_and_dear_drafts_cost_little(
    streams: int, acceptance: float, costs: dict[str, Any], slow: int
) -> None:
    for seed in SEEDS:
        steps = SimulatedSteps(streams, acceptance, seed=seed, slow=slow, **costs)
        steps.run(300)
        assert steps.run(700) > 0.93  # of which the noise of a step's duration is 0.04
