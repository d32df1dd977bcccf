"""What every client is asked for: an answer and a call that are small enough for a tiny model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

MODEL = "penstock-demo"
QUESTION = "What does os.path.join do?"


class Answer(BaseModel):
    """Whether a function opens files."""

    sure: bool
    kind: Literal["reader", "writer"]


def add(first: bool, second: bool) -> str:
    """Add two truths.

    Args:
        first: The one truth.
        second: The other truth.
    """
    return str(first + second)
