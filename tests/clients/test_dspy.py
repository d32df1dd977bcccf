"""DSPy."""

from __future__ import annotations

from typing import Literal

import dspy

from tests.clients.shapes import MODEL, QUESTION


class Classify(dspy.Signature):
    """Classify the question."""

    question: str = dspy.InputField()
    kind: Literal["reader", "writer"] = dspy.OutputField()


def test_a_prediction_under_a_schema(url: str) -> None:
    lm = dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", max_tokens=200, temperature=0, cache=False)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Classify)(question=QUESTION).kind in ("reader", "writer")
    assert lm(QUESTION)[0]
