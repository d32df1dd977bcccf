"""Text and vectors by one engine: neither waits for the other, and each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold, StepRows
from penstock.engine.pooling.beside_text import FIRST_TOKENS, FreeTokens, TextAndVectors
from penstock.engine.pooling.engine import PoolingEngine
from penstock.engine.pooling.model import PoolingBatch
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.engine.synthetic.pooling import SyntheticPooling
from penstock.wire.arrays import F32
from penstock.wire.frames import FinishReason
from tests.engine.pooling.support import WIDTH, make_engine, pooling_submit, run, vectors_of
from tests.engine.support import Clock, Received, submit

STEP_S, TOKEN_S = 0.01, 0.001
"""Seconds of a step of text, and of a token of vectors."""


class TimedModel(SyntheticPooling):
    """Takes the same time for each token, and ``step_s`` for each step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(WIDTH, 2, generates=True)
        self._clock = clock
        self.step_s = 0.0
        self.batches: list[int] = []

    def compute(self, batch: PoolingBatch) -> Sequence[F32]:
        self.batches.append(len(batch.ids))
        self._clock.sleep(self.step_s + TOKEN_S * len(batch.ids))
        return super().compute(batch)


class Bench:
    def __init__(self, model_dir: Path, **options: object) -> None:
        self.clock = Clock()
        config = ServeConfig(engine="synthetic", synthetic_step_ms=1000 * STEP_S, **options)  # type: ignore[arg-type]
        text = SyntheticEngine(config, str(model_dir), clock=self.clock, sleep=self.clock.sleep)
        self.model = TimedModel(self.clock)
        info = msgspec.structs.replace(text.info, pooling=self.model.info, vocab_size=100_000)
        self.engine = TextAndVectors(config, text, PoolingEngine(config, self.model, info), clock=self.clock)
        self.received = Received()
        self.steps: list[StepRows] = []
        self.text_at: list[float] = []

    def step(self) -> StepRows:
        rows = self.engine.step()
        self.steps.append(rows)
        if rows.vectors is None:
            self.received.step(rows)
            self.text_at += [self.clock()] * bool(len(rows.tokens))
        else:
            assert rows.count is not None
            assert len(rows.tokens) == int(rows.count.sum())
        return rows

    def run(self) -> None:
        while self.engine.has_work():
            assert self.engine.can_step()
            self.step()


def test_each_gets_what_it_gets_alone(model_dir: Path) -> None:
    alone = Bench(model_dir)
    alone.engine.submit(0, submit(1, 30, seed=5))
    alone.run()
    vectors = make_engine(SyntheticPooling(WIDTH, 2))
    vectors.submit(0, pooling_submit(2, [7] * 40))
    expected = vectors_of(run(vectors), 2)

    both = Bench(model_dir)
    both.engine.submit(0, submit(1, 30, seed=5))
    both.engine.submit(0, pooling_submit(2, [7] * 40))
    assert (both.engine.load().waiting, both.engine.load().running) == (2, 0)
    both.run()
    assert both.received.tokens[1] == alone.received.tokens[1]
    assert vectors_of(both.steps, 2).tobytes() == expected.tobytes()
    assert (both.engine.load().waiting, both.engine.load().running) == (0, 0)
    assert both.engine.info.pooling is not None
    assert both.engine.info.pooling.generates


def test_vectors_delay_text_as_prompts_may(model_dir: Path) -> None:
    """2,048 inputs beside a stream: the gap between two tokens stays within --max-prefill-delay steps."""
    bench = Bench(model_dir, max_prefill_delay=3.0)
    bench.engine.submit(0, submit(1, 400))
    for _ in range(10):
        bench.step()
    bench.engine.submit(0, pooling_submit(2, [5] * 2048))
    for _ in range(380):
        bench.step()
    assert bench.model.batches[0] <= FIRST_TOKENS
    late = np.diff(bench.text_at[9:])
    assert late[1:].max() <= 3.0 * STEP_S + 1e-9
    assert late[0] <= STEP_S + FIRST_TOKENS * TOKEN_S + 1e-9
    assert len(bench.text_at) >= 190, "text gets every other step"
    bench.run()
    assert len(vectors_of(bench.steps, 2)) == 2048


@pytest.mark.parametrize("step_s", [0.2, 0.5])
def test_short_requests_do_not_keep_steps_small(model_dir: Path, step_s: float) -> None:
    """Where a step costs more than its few tokens, 1,000 of an input each would bring no text any sooner."""
    bench = Bench(model_dir)
    bench.model.step_s = step_s
    for stream in range(100):
        bench.engine.submit(0, pooling_submit(stream, [3]))
        bench.run()
    bench.model.batches.clear()
    bench.engine.submit(0, submit(200, 1500))
    bench.engine.submit(0, pooling_submit(201, [3] * 1000))
    while len(bench.model.batches) < 120 and bench.engine._pooling.has_work():
        bench.step()
    assert len(vectors_of(bench.steps, 201)) == 1000
    assert np.diff(bench.text_at).max() <= 2 * step_s + STEP_S, "hardly more than the least step takes"


def test_free_tokens_stay_near_those_of_steps() -> None:
    """However many steps take the same time."""
    free = FreeTokens()
    for _ in range(10_000):
        free.observe(0.01, 500, more=True)
    assert 500 < free.tokens < 1500
    free.observe(0.1, 1000, more=True)
    assert free.tokens < 750


def test_without_text_steps_of_vectors_are_whole(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_batched_tokens=1000, max_num_seqs=400, max_model_len=512)
    bench.engine.submit(0, pooling_submit(2, [5] * 400))
    bench.run()
    assert bench.model.batches == [1000, 1000]


def test_streams_of_both_are_aborted_dropped_and_failed(model_dir: Path) -> None:
    bench = Bench(model_dir)
    bench.engine.submit(0, submit(1, 30))
    bench.engine.submit(0, pooling_submit(2, [7]))
    bench.engine.abort(0, [1, 2, 3])
    rows = [bench.step() for _ in range(2)]
    ended: dict[int, int] = {}
    for each in rows:
        assert each.finish is not None
        ended |= zip(each.stream.tolist(), each.finish.tolist(), strict=True)
    assert ended == {1: FinishReason.ABORT, 2: FinishReason.ABORT}
    assert not bench.engine.has_work()

    bench.engine.submit(0, submit(1, 30))
    bench.engine.submit(0, pooling_submit(2, [7]))
    bench.engine.submit(1, pooling_submit(2, [7]))
    bench.engine.drop_server(0)
    assert bench.engine.load().waiting == 1
    bench.engine.submit(0, submit(1, 30))
    failed = bench.engine.fail_all("engine_error", "broken").failed
    assert sorted((each.server, each.stream) for each in failed) == [(0, 1), (1, 2)]
    assert not bench.engine.has_work()


def test_what_is_held_does_not_step(model_dir: Path) -> None:
    bench = Bench(model_dir)
    bench.engine.hold(Hold.ALL)
    bench.engine.submit(0, submit(1, 3))
    bench.engine.submit(0, pooling_submit(2, [7]))
    assert bench.engine.has_work()
    assert not bench.engine.can_step()
    bench.engine.hold(Hold.NOTHING)
    admitted: list[tuple[int, int]] = []
    while bench.engine.has_work():
        bench.step()
        admitted += bench.engine.take_admitted()
    assert sorted(admitted) == [(0, 1), (0, 2)]


def test_sleep_frees_what_vectors_take(model_dir: Path) -> None:
    bench, freed = Bench(model_dir), []
    bench.engine._free = lambda: freed.append(1)
    bench.engine.call("sleep", {"level": 1})
    bench.engine.call("wake_up", {})
    assert freed == [1]
    with pytest.raises(ValueError, match="no operation"):
        bench.engine.call("never", {})
