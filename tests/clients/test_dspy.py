"""DSPy, which sends a schema only where it is told that the model takes one: its adapters ask in text."""

from __future__ import annotations

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from tests.clients.shapes import MODEL, QUESTION, Answer


@pytest.fixture
def lm(url: str) -> dspy.LM:
    options = {"max_tokens": 200, "temperature": 0, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", **options)


def test_text_and_an_answer_under_a_schema(lm: dspy.LM) -> None:
    assert lm(QUESTION)[0]
    assert Answer.model_validate_json(lm(QUESTION, response_format=Answer)[0])


def test_a_prediction_is_asked_for(lm: dspy.LM) -> None:
    """A tiny model does not keep to the adapter's markers, which DSPy says; the server answers each time."""
    with dspy.context(lm=lm), pytest.raises(AdapterParseError):
        dspy.Predict("question -> kind: bool")(question=QUESTION)
    assert lm.history
