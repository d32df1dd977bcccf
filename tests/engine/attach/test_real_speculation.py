"""vLLM's speculative decoding: several tokens of a stream are one row, and the same tokens as without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.attach.engine import AttachedEngine
from penstock.engine.base import ACCEPTED_PER_POSITION
from penstock.wire.frames import FinishReason
from tests.engine.attach.small_engine import PROMPT, SLOTS, Run, make_model, start_engine, step
from tests.engine.support import submit

pytestmark = pytest.mark.filterwarnings("ignore")

DRAFTS = 4
NGRAM = f'{{"method": "ngram", "num_speculative_tokens": {DRAFTS}, "prompt_lookup_max": 3}}'
OWN = ["--enforce-eager", "--block-size", "32"]
OPTIONS = {"dtype": "float32", "max_num_seqs": SLOTS, "kv_cache_memory": 16 << 20}
FEW = (60, 61, 62)
"""A stream that may have these tokens alone repeats itself, so that many drafts are accepted."""
GREEDY: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0.0,
    "ignore_eos": True,
    "allowed_token_ids": FEW,
}
REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 120},
    {"max_tokens": 117, "logprobs": 2},
    {"max_tokens": 90, "interval": 7, "prompt": PROMPT * 5},
    {"max_tokens": 90, "interval": 4, "logprobs": 1, "prompt": PROMPT * 5},
]


class Sizes(Run):
    """Also the tokens of every row, and those whose logprobs came with it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, list[int]] = {}

    def take(self, rows: Any) -> None:
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        scored = np.zeros(len(rows.tokens), np.bool_)
        if rows.logprobs is not None:
            scored[rows.logprobs.token] = True
        owner = np.repeat(rows.stream, counts)
        for stream, count in zip(rows.stream.tolist(), counts.tolist(), strict=True):
            self.sizes.setdefault(stream, []).append(count)
            with_scores = "logprobs" in REQUESTS[stream]
            assert (scored[owner == stream] == with_scores).all(), "logprobs out of step"
        super().take(rows)


def run_all(engine: AttachedEngine) -> Sizes:
    received = Sizes()
    for stream, fields in enumerate(REQUESTS):
        engine.submit(0, submit(stream, **GREEDY | fields))
    while engine.has_work():
        received.take(step(engine))
    return received


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def plain(model: Path) -> Sizes:
    """The streams of an engine without drafts."""
    engine = start_engine(model, model, OWN, OPTIONS)
    try:
        received = run_all(engine)
        assert not any(name.startswith(ACCEPTED_PER_POSITION) for name in engine.metrics())
        return received
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(model: Path, plain: Sizes) -> Iterator[AttachedEngine]:
    made = start_engine(model, model, [*OWN, "--speculative-config", NGRAM], OPTIONS)
    yield made
    made.close()


def test_rows_of_several_tokens_have_the_tokens_of_single_ones(engine: AttachedEngine, plain: Sizes) -> None:
    before = engine.metrics()
    found = run_all(engine)
    assert found.tokens == plain.tokens
    assert set(found.finish.values()) == {FinishReason.LENGTH}
    assert max(plain.sizes[0]) == 1
    assert max(found.sizes[0]) > 1
    assert max(found.sizes[1]) > 1
    assert len(found.sizes[1]) < len(plain.sizes[1]), "fewer rows"
    assert min(found.sizes[2][1:-1]) >= 7
    assert min(found.sizes[3][1:-1]) >= 4
    for stream in (1, 3):
        for (ids, values), (known, wanted) in zip(
            found.logprobs[stream], plain.logprobs[stream], strict=True
        ):
            assert ids[0] == known[0]
            assert values[0] == pytest.approx(wanted[0], abs=1e-3)
    assert found.frames < plain.frames
    added = {name: value - before.get(name, 0) for name, value in engine.metrics().items()}
    places = [added[f"{ACCEPTED_PER_POSITION}{place}"] for place in range(DRAFTS)]
    assert places == sorted(places, reverse=True)
    assert 0 < sum(places) == added["spec_decode_accepted_tokens_total"]
    assert places[0] <= added["spec_decode_drafts_total"]
    assert sum(places) <= added["spec_decode_draft_tokens_total"]


def test_a_stop_token_within_a_row_ends_it(engine: AttachedEngine, plain: Sizes) -> None:
    """vLLM drops what was accepted behind it."""
    known = plain.tokens[0]
    for begin in range(60, 72):
        received = Run()
        prompt, stop = [*PROMPT, *known[:begin]], known[begin + 3]
        fields = {"prompt": prompt, "max_tokens": 40, "stop_token_ids": (stop,)}
        engine.submit(0, submit(0, **GREEDY | fields))
        while engine.has_work():
            received.take(step(engine))
        assert received.tokens[0] == known[begin : known.index(stop, begin) + 1]
        assert received.finish == {0: FinishReason.STOP_TOKEN}


def test_a_stream_that_is_resumed_goes_on_with_the_same_tokens(engine: AttachedEngine, plain: Sizes) -> None:
    known = plain.tokens[0]
    received = Run()
    received.tokens[0] = known[:70]
    prompt = [*PROMPT, *known[:70]]
    engine.submit(0, submit(0, **GREEDY | {"prompt": prompt, "max_tokens": 120, "resumed": 70}))
    while engine.has_work():
        received.take(step(engine))
    assert received.tokens[0] == known
