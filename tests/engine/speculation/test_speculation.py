"""When drafts are looked for."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingFeature, SamplingMetadata
from penstock.engine.speculation.speculation import MAX_BACKOFF_STEPS, MAX_EMPTY_PROPOSALS, Speculation
from penstock.wire.arrays import I32
from penstock.wire.messages import SamplingParams, Submit

SLOTS = np.arange(2)


class Scripted:
    """A proposer that drafts one token while it may, and notes when it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.step = 0
        self.drafts = False

    def begin(self, slot: int, scope: int = 0) -> None: ...

    def restart(self, slot: int) -> None: ...

    def reset(self) -> None: ...

    def end(self, slot: int) -> None: ...

    def propose(self, slots: np.ndarray, most: I32) -> I32:  # type: ignore[type-arg]
        self.asked.append(self.step)
        return np.full(len(slots), int(self.drafts), np.int32)


class Steps:
    def __init__(self, tokens: int | None) -> None:
        self.proposer = Scripted()
        table = SlotTable(2, 64, ())
        for stream in range(2):
            table.allocate(0, Submit(stream, np.arange(3, dtype="<i4").tobytes(), SamplingParams(50, 0)))
        self.sampling = SamplingMetadata(table, 100)
        self.speculation = Speculation(table, self.sampling, self.proposer, tokens)
        for slot in range(2):
            self.speculation.begin(slot)

    def run(self, count: int) -> list[int]:
        """Steps, of ``count``, in which the proposer was asked."""
        self.proposer.asked.clear()
        for step in range(count):
            self.proposer.step = step
            self.speculation.plan(SLOTS)
            most = self.speculation.limit[SLOTS]
            if most.any():
                self.speculation.propose(SLOTS, most)
            self.speculation.observe(0.01, 2, 2, drafts=False)
        return list(self.proposer.asked)


def test_streams_that_repeat_nothing_are_looked_at_less_and_less_often() -> None:
    steps = Steps(None)
    assert steps.run(MAX_EMPTY_PROPOSALS) == list(range(MAX_EMPTY_PROPOSALS))
    asked = steps.run(1000)
    assert 1000 / (MAX_BACKOFF_STEPS + 1) <= len(asked) <= 1000 / (MAX_BACKOFF_STEPS + 1) + 40
    assert set(np.diff(asked[-20:])) == {MAX_BACKOFF_STEPS + 1}


def test_a_draft_and_a_new_stream_end_the_backoff() -> None:
    steps = Steps(None)
    steps.run(1000)
    steps.speculation.begin(1)
    assert steps.run(1) == [0]
    steps.proposer.drafts = True
    asked = steps.run(MAX_BACKOFF_STEPS + 20)
    assert np.diff(asked).tolist()[1:] == [1] * (len(asked) - 2)
    assert asked[-1] == MAX_BACKOFF_STEPS + 19


def test_a_set_number_of_tokens_is_looked_for_in_every_step() -> None:
    assert Steps(3).run(200) == list(range(200))


def test_what_a_grammar_forces_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(None)
    steps.run(1000)
    steps.sampling.needs[0] = SamplingFeature.GRAMMAR
    steps.speculation.plan(SLOTS)
    assert steps.speculation.limit[0] > 0
    assert steps.speculation.limit[1] == 0
