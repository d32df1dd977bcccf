"""The mix is the same for the same seed, and has all that it is to have."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.soak.oracle import Oracle
from tests.soak.request_mix import ClientBehaviour, RequestMix, RequestSpec


@pytest.fixture(scope="module")
def drawn() -> list[RequestSpec]:
    mix = RequestMix(Oracle(DEMO_DIR), random.Random(1))
    return [mix.draw() for _ in range(600)]


def test_the_same_seed_draws_the_same_requests(drawn: list[RequestSpec]) -> None:
    mix = RequestMix(Oracle(DEMO_DIR), random.Random(1))
    assert [mix.draw() for _ in range(50)] == drawn[:50]


def test_every_manner_and_feature_occurs(drawn: list[RequestSpec]) -> None:
    assert set(ClientBehaviour) == {spec.behaviour for spec in drawn}
    assert {400, 404} < {spec.status for spec in drawn}
    fields = Counter(name for spec in drawn if isinstance(spec.content, dict) for name in spec.content)
    for name in (
        "n",
        "stop",
        "logprobs",
        "return_token_ids",
        "stream_interval",
        "stream_options",
        "messages",
    ):
        assert fields[name] > 3, name
    assert any(not spec.streamed and spec.status == 200 for spec in drawn)


def test_good_requests_know_every_choice(drawn: list[RequestSpec]) -> None:
    for spec in drawn:
        if spec.status != 200:
            assert spec.asked_tokens == 0
            continue
        assert isinstance(spec.content, dict)
        prompt = spec.content.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
        assert len(spec.outputs) == prompts * spec.content.get("n", 1)
        assert sum(len(output.tokens) for output in spec.outputs) <= spec.asked_tokens
        if "stop" in spec.content:
            assert spec.outputs[0].finish_reason == "stop"
