"""The oracle agrees with the engine, and knows where a stop string ends an output."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from penstock.wire.messages import SamplingParams, Submit
from tests.soak.oracle import Oracle


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(DEMO_DIR)


def test_tokens_are_the_engines(oracle: Oracle) -> None:
    engine = SyntheticEngine(ServeConfig(engine="synthetic", synthetic_step_ms=0), str(DEMO_DIR))
    prompt = np.array([5, 6], "<i4").tobytes()
    engine.submit(0, Submit(0, prompt, SamplingParams(max_tokens=40, seed=7)))
    tokens: list[int] = []
    while engine.has_work():
        tokens += engine.step().tokens.tolist()
    assert tokens == oracle.tokens(7, 40)


def test_an_output_ends_at_its_limit(oracle: Oracle) -> None:
    output = oracle.output(7, 12, None)
    assert output.tokens == oracle.tokens(7, 12)
    assert output.text == oracle.text(output.tokens)
    assert output.finish_reason == "length"


def test_an_output_ends_at_its_stop_string(oracle: Oracle) -> None:
    text = oracle.text(oracle.tokens(7, 50))
    stop = text[60:66]
    output = oracle.output(7, 50, stop)
    assert output.finish_reason == "stop"
    assert output.text == text[: text.find(stop)]
    assert stop in oracle.text(output.tokens)
    assert stop not in oracle.text(output.tokens[:-1])
    assert oracle.output(7, 50, stop, include_stop=True).text == output.text + stop


def test_a_stop_string_that_does_not_come_ends_nothing(oracle: Oracle) -> None:
    assert oracle.output(7, 50, "\0") == oracle.output(7, 50, None)


def test_the_fewest_tokens_of_a_text_are_found(oracle: Oracle) -> None:
    tokens = oracle.tokens(3, 30)
    for count in range(30):
        characters = len(oracle.text(tokens[:count]))
        assert oracle.tokens_in(tokens, characters) == count
