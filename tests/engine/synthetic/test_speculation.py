"""Several tokens per step of the synthetic engine: the same tokens, in fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.wire.frames import FinishReason
from tests.engine.support import PROMPT, submit
from tests.engine.synthetic.test_engine import Bench, tokens_of

WIDE = {"synthetic_tokens_per_step": 3}
VARIED = {"synthetic_tokens_per_step": 6, "synthetic_acceptance_rate": 0.6}
PER_POSITION = "spec_decode_accepted_tokens_per_pos_total"


def rows_of(bench: Bench, stream: int) -> list[int]:
    """Tokens in each of a stream's rows, to the end."""
    sizes = []
    while bench.engine.has_work():
        rows = bench.step()
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        sizes += counts[rows.stream == stream].tolist()
    return sizes


def test_a_stream_has_one_token_and_then_as_many_as_a_step_has(model_dir: Path) -> None:
    bench = Bench(model_dir, **WIDE)
    bench.engine.submit(0, submit(1, 12))
    assert rows_of(bench, 1) == [1, 3, 3, 3, 2]
    assert bench.received.finish == {1: FinishReason.LENGTH}


@pytest.mark.parametrize("options", [WIDE, VARIED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_whatever_the_number_per_step(
    model_dir: Path, options: dict[str, Any], temperature: float
) -> None:
    requests = [submit(stream, 40 + stream, temperature=temperature) for stream in range(4)]
    expected = [tokens_of(model_dir, request) for request in requests]
    crowd = Bench(model_dir, max_num_seqs=3, **options)
    for request in requests:
        crowd.engine.submit(0, request)
    received = crowd.finish()
    assert [received.tokens[stream] for stream in range(4)] == expected
    assert received.rows < sum(map(len, expected)) / 1.5


def test_rows_of_random_lengths(model_dir: Path) -> None:
    bench = Bench(model_dir, **VARIED)
    bench.engine.submit(0, submit(1, 400))
    sizes = rows_of(bench, 1)
    assert set(sizes[1:-1]) == set(range(1, 7))
    again = Bench(model_dir, **VARIED)
    for stream in range(3):
        again.engine.submit(0, submit(stream, 400))
    assert rows_of(again, 1) == sizes


def test_nothing_is_accepted_at_rate_0(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_tokens_per_step=4, synthetic_acceptance_rate=0.0)
    bench.engine.submit(0, submit(1, 5))
    assert rows_of(bench, 1) == [1] * 5
    assert bench.engine.metrics()["spec_decode_accepted_tokens_total"] == 0


@pytest.mark.parametrize("options", [WIDE, VARIED])
def test_a_stop_token_within_a_row_ends_it(model_dir: Path, options: dict[str, Any]) -> None:
    tokens = tokens_of(model_dir, submit(1, 200))
    for place in (20, 21, 22, 23):
        stop = tokens[place]
        bench = Bench(model_dir, **options)
        bench.engine.submit(0, submit(1, 200, stop_token_ids=(stop,)))
        received = bench.finish()
        assert received.tokens[1] == tokens[: tokens.index(stop) + 1]
        assert received.finish == {1: FinishReason.STOP_TOKEN}


def test_logprobs_are_of_all_tokens_of_a_row(model_dir: Path) -> None:
    bench = Bench(model_dir, **WIDE)
    bench.engine.submit(0, submit(1, 10, logprobs=1))
    bench.engine.submit(0, submit(2, 10))
    scored: list[int] = []
    while bench.engine.has_work():
        rows = bench.step()
        assert rows.logprobs is not None
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        owners = np.repeat(rows.stream, counts)
        assert np.flatnonzero(owners == 1).tolist() == rows.logprobs.token.tolist()
        assert rows.logprobs.ids[:, 0].tolist() == rows.tokens[rows.logprobs.token].tolist()
        scored += rows.logprobs.ids[:, 0].tolist()
    assert scored == bench.received.tokens[1]


def test_abort_and_resumption(model_dir: Path) -> None:
    whole = tokens_of(model_dir, submit(1, 30))
    bench = Bench(model_dir, **WIDE)
    bench.engine.submit(0, submit(1, 30))
    for _ in range(3):
        bench.step()
    bench.engine.abort(0, [1])
    bench.step()
    assert bench.received.finish == {1: FinishReason.ABORT}
    assert bench.received.tokens[1] == whole[:7]
    again = Bench(model_dir, **WIDE)
    again.received.tokens[1] = whole[:7]
    again.engine.submit(0, submit(1, 30, prompt=(*PROMPT, *whole[:7]), resumed=7))
    assert rows_of(again, 1) == [1, 3, 3, 3, 3, 3, 3, 3, 1]
    assert again.received.tokens[1] == whole


def test_drafts_are_counted(model_dir: Path) -> None:
    bench = Bench(model_dir, **WIDE)
    bench.engine.submit(0, submit(1, 12))  # rows of 1, 3, 3, 3 and 2 tokens
    bench.finish()
    assert bench.engine.metrics() == {
        "spec_decode_drafts_total": 4,
        "spec_decode_draft_tokens_total": 7,
        "spec_decode_accepted_tokens_total": 7,
        f"{PER_POSITION}/0": 4,
        f"{PER_POSITION}/1": 3,
    }
    assert bench.engine.load().generated == 12
    varied = Bench(model_dir, **VARIED)
    varied.engine.submit(0, submit(1, 400))
    varied.finish()
    figures = varied.engine.metrics()
    places = [figures[f"{PER_POSITION}/{place}"] for place in range(5)]
    assert places == sorted(places, reverse=True)
    assert (
        sum(places)
        == figures["spec_decode_accepted_tokens_total"]
        < 0.6 * figures["spec_decode_draft_tokens_total"]
    )
    assert 0.5 < places[0] / figures["spec_decode_drafts_total"] < 0.7
    assert Bench(model_dir).engine.metrics() == {}


def test_a_script_has_its_own_pace() -> None:
    with pytest.raises(ValueError, match="--synthetic-tokens-per-step 2: a script's replies"):
        ServeConfig(engine="synthetic", synthetic_script="rules.yaml", synthetic_tokens_per_step=2)
