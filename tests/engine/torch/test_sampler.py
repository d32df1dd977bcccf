"""The sampler against exact probabilities, and against a plain reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import NO_TOKEN, SamplingMetadata
from penstock.engine.torch.sampling import listed_bounds
from penstock.engine.torch.sampling.listed_bounds import REFRESHED_FROM
from penstock.engine.torch.sampling.penalties import LISTED_SHARE, TokenCounts
from penstock.engine.torch.sampling.sampler import (
    FEW_CANDIDATES,
    SOME_CANDIDATES,
    Sampler,
    sample_from_weights,
    search_at_once,
    search_step_by_step,
)
from penstock.engine.torch.transfer import HostCopy
from penstock.wire.messages import SamplingParams
from tests.engine.torch.harness import DEVICE, finished, submit
from tests.engine.torch.sampling_reference import any_sampling, distribution, edited

pytestmark = pytest.mark.gpu

DRAWS = 4_000
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0], np.float32)
# The 99.99 % quantile of chi-square with 7 degrees of freedom (fewer tokens: fewer degrees, a lower
# quantile). Seeds are fixed: a run either always passes or never does.
CHI_SQUARE_MOST = 29.9
PROMPT, OUTPUT = [3, 0, 0], [6, 6, 1]


class Bench:
    """A sampler over streams whose histories a test writes."""

    def __init__(self, slots: int, vocab: int = len(LOGITS)) -> None:
        self.table = SlotTable(slots, 64, [])
        self.columns = SamplingMetadata(self.table, vocab)
        self.sampler = Sampler(self.columns)
        self.slots: list[int] = []

    def add(
        self, prompt: list[int] = PROMPT, output: list[int] | None = None, **sampling: Any
    ) -> SamplingParams:
        """A stream that has given ``output`` so far."""
        request = submit(len(self.slots), prompt, **sampling)
        slot = self.table.allocate(0, request)
        self.columns.set(slot, request.sampling)
        self.slots.append(slot)
        for token in output or []:
            self.table.append_and_check_stop(np.array([slot]), np.array([token], np.int32))
        return request.sampling

    def sample(self, logits: np.ndarray, slots: list[int] | None = None) -> Any:
        chosen = np.array(self.slots if slots is None else slots, np.intp)
        length = self.table.length[chosen]
        output = self.sampler.sample(torch.from_numpy(logits.copy()).to(DEVICE), chosen, length).to_host()
        finished()
        return output.read_tokens()

    def settle(self, tokens: np.ndarray) -> None:
        self.table.append_and_check_stop(np.array(self.slots, np.intp), tokens)


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": 0.4},
    {"logit_bias": {7: 3.5, 0: -2.0}},
    {"allowed_token_ids": (1, 4, 7)},
    {"bad_words": ((2,), (6, 1, 0), (3, 4))},
    {"min_tokens": 5, "stop_token_ids": (0, 1)},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {4: 2.0}, "bad_words": ((6,),)},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_draws_follow_the_exact_distribution(parameters: dict[str, Any]) -> None:
    bench = Bench(DRAWS)
    for stream in range(DRAWS):
        sampling = bench.add(output=OUTPUT, seed=stream * 7919 + 1, **({"temperature": 1.0} | parameters))
    tokens, _ = bench.sample(np.tile(LOGITS, (DRAWS, 1)))
    counts = np.bincount(tokens, minlength=len(LOGITS))
    probabilities = distribution(edited(LOGITS, sampling, PROMPT, OUTPUT), sampling)
    assert chi_square(counts, probabilities) < CHI_SQUARE_MOST


def test_positions_of_one_seed_are_independent_draws() -> None:
    bench = Bench(100)
    for stream in range(100):
        sampling = bench.add([3], temperature=1.0, seed=stream, max_tokens=60)
    logits = np.tile(LOGITS, (100, 1))
    counts = np.zeros(len(LOGITS), np.int64)
    pairs = np.zeros((len(LOGITS), len(LOGITS)), np.int64)
    last = None
    for _ in range(50):
        tokens, _ = bench.sample(logits)
        counts += np.bincount(tokens, minlength=len(LOGITS))
        if last is not None:
            np.add.at(pairs, (last, tokens), 1)
        bench.settle(tokens)
        last = tokens
    probabilities = distribution(edited(LOGITS, sampling, [], []), sampling)
    assert chi_square(counts, probabilities) < CHI_SQUARE_MOST
    joint = np.outer(probabilities, probabilities).ravel()
    assert chi_square(pairs.ravel(), joint) < 110  # 63 degrees of freedom, 99.98 %


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    assert counts[probabilities == 0].sum() == 0, "a token that is impossible"
    possible = probabilities > 0
    wanted = probabilities[possible] * counts.sum()
    return float(((counts[possible] - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("vocab", [5, 40, 3 * FEW_CANDIDATES + 5, SOME_CANDIDATES + 300])
def test_rows_of_mixed_parameters_are_those_of_a_plain_reference(vocab: int) -> None:
    """Every row of every step: what it may be, what it is alone, and that it is where its draw falls."""
    rng = np.random.default_rng(vocab)
    for _ in range(25):
        rows = int(rng.integers(1, 9))
        bench = Bench(rows, vocab)
        prompts = [rng.integers(0, vocab, rng.integers(1, 20)).tolist() for _ in range(rows)]
        samplings = [bench.add(prompt, max_tokens=40, **any_sampling(rng, vocab)) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in range(rows)]
        for _ in range(6):
            logits = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
            slots = np.array(bench.slots)
            places = bench.columns.uniforms(slots, bench.table.length[slots])
            tokens, logprobs = bench.sample(logits)
            chosen = tokens.copy()
            for row in range(rows):
                wanted = edited(logits[row], samplings[row], prompts[row], outputs[row])
                if np.isneginf(wanted).all():
                    assert tokens[row] == NO_TOKEN
                    tokens[row] = rng.integers(vocab)  # for the history to go on
                    outputs[row].append(int(tokens[row]))
                    continue
                ends = np.cumsum(distribution(wanted, samplings[row]))
                token = int(tokens[row])
                assert ends[token] > (ends[token - 1] if token else 0), "a token that is impossible"
                if samplings[row].temperature:
                    assert (ends[token - 1] if token else 0) - 1e-5 <= places[row] <= ends[token] + 1e-5
                outputs[row].append(token)
            _check_logprobs(logprobs, logits, chosen, samplings)
            bench.settle(tokens)
            for row, slot in enumerate(bench.slots):
                outputs[row] = bench.table.history[
                    slot, len(prompts[row]) : bench.table.length[slot]
                ].tolist()


def _check_logprobs(
    logprobs: Any, logits: np.ndarray, tokens: np.ndarray, samplings: list[SamplingParams]
) -> None:
    asked = [row for row, sampling in enumerate(samplings) if sampling.logprobs >= 0]
    assert (logprobs is None) == (not asked)
    for entry, row in enumerate(asked):
        if tokens[row] == NO_TOKEN:
            continue
        exact = logits[row] - np.log(np.exp(logits[row].astype(np.float64)).sum())
        best = np.argsort(-exact, kind="stable")[: samplings[row].logprobs].tolist()
        best = list(samplings[row].logprob_token_ids) or best
        ids = logprobs.ids[entry][logprobs.ids[entry] >= 0]
        assert logprobs.token[entry] == row
        assert ids.tolist() == [tokens[row], *best]
        assert logprobs.values[entry][: len(ids)] == pytest.approx(exact[ids], abs=1e-4)
        assert logprobs.rank[entry] == (exact > exact[tokens[row]]).sum() + 1


def test_a_mixed_batch_is_its_rows_one_by_one() -> None:
    rng = np.random.default_rng(5)
    vocab, rows = 700, 48
    settings = [any_sampling(rng, vocab) for _ in range(rows)]
    together, alone = Bench(rows, vocab), Bench(rows, vocab)
    for setting in settings:
        together.add([1, 2, 3], max_tokens=40, **setting)
        alone.add([1, 2, 3], max_tokens=40, **setting)
    for _ in range(5):
        logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
        tokens, _ = together.sample(logits)
        one_by_one = [
            int(alone.sample(logits[row : row + 1], [slot])[0][0]) for row, slot in enumerate(alone.slots)
        ]
        assert tokens.tolist() == one_by_one
        together.settle(tokens)
        alone.settle(tokens)


def test_a_slot_that_is_used_again_counts_from_the_start() -> None:
    bench = Bench(1)
    for prompt in ([0, 0, 6], [1]):
        bench.add(prompt, repetition_penalty=10.0, presence_penalty=2.0)
        wanted = edited(LOGITS, bench_sampling(bench), prompt, [])
        tokens, _ = bench.sample(LOGITS[None])
        assert tokens[0] == wanted.argmax()
        bench.settle(tokens)
        slot = bench.slots.pop()
        bench.columns.clear(slot)
        bench.table.release(slot)


def bench_sampling(bench: Bench) -> SamplingParams:
    slot, columns = bench.slots[0], bench.columns
    return SamplingParams(
        1, 0, repetition_penalty=columns.repetition[slot], presence_penalty=columns.presence[slot]
    )


def test_histories_of_many_distinct_tokens_are_counted() -> None:
    vocab = 60
    bench = Bench(2, vocab)
    bench.add([0], max_tokens=60, frequency_penalty=1.0)
    bench.add(list(range(30)), max_tokens=30, presence_penalty=2.0)
    logits = np.zeros((2, vocab), np.float32)
    given = []
    for _ in range(30):
        tokens, _ = bench.sample(logits)
        given.append(tokens)
        bench.settle(tokens)
    assert sorted(row[0] for row in given) == list(range(30))  # never the same token twice
    assert sorted(row[1] for row in given) == list(range(30))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_no_token_left_get_none(temperature: float) -> None:
    bench = Bench(3)
    bench.add(temperature=temperature, allowed_token_ids=(2,), bad_words=((2,),), top_p=0.9, logprobs=1)
    bench.add(temperature=temperature, allowed_token_ids=(2,), top_p=0.9)
    bench.add(temperature=temperature, stop_token_ids=tuple(range(len(LOGITS))), min_tokens=1)
    tokens, logprobs = bench.sample(np.tile(LOGITS, (3, 1)))
    assert tokens.tolist() == [NO_TOKEN, 2, NO_TOKEN]
    assert logprobs is not None


def test_tokens_without_weight_are_never_picked() -> None:
    weights = torch.zeros((4, 1000))
    weights[:, [3, 127, 128, 640, 999]] = torch.tensor([1e-6, 1.0, 1e-3, 0.3, 1e-7])
    edges = torch.tensor([[0.0], [1 - 2.0**-52], [0.5], [0.99999]], dtype=torch.float64)
    weights, edges = weights.to(DEVICE), edges.to(DEVICE)
    assert set(sample_from_weights(weights, edges).tolist()) <= {3, 127, 128, 640, 999}
    assert sample_from_weights(weights, edges)[0] == 3
    assert sample_from_weights(weights, edges)[1] == 999


def test_penalties_of_a_growing_history_are_those_of_a_plain_reference() -> None:
    """From a few listed tokens to more than are listed: every step's tokens, greedy."""
    vocab = 30 * LISTED_SHARE
    rng = np.random.default_rng(11)
    bench = Bench(3, vocab)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "frequency_penalty": 1.1},
        {"presence_penalty": 1.3, "frequency_penalty": -0.2},
    ]
    prompts = [[int(rng.integers(vocab))], [1, 1, 2], list(range(25))]
    samplings = [
        bench.add(prompt, max_tokens=50, **setting) for prompt, setting in zip(prompts, settings, strict=True)
    ]
    outputs: list[list[int]] = [[], [], []]
    for _ in range(39 - 3):
        logits = rng.normal(0, 2, (3, vocab)).astype(np.float32)
        tokens, _ = bench.sample(logits)
        for row in range(3):
            wanted = edited(logits[row], samplings[row], prompts[row], outputs[row])
            assert tokens[row] == wanted.argmax()
            outputs[row].append(int(tokens[row]))
        bench.settle(tokens)


def counted_stream(vocab: int, length: int, prompt: list[int]) -> tuple[SlotTable, TokenCounts]:
    """Token counts of a stream with a penalty, in slot 0."""
    table = SlotTable(1, length, [])
    metadata = SamplingMetadata(table, vocab)
    request = submit(0, prompt, max_tokens=length, presence_penalty=1.0)
    metadata.set(table.allocate(0, request), request.sampling)
    return table, TokenCounts(metadata)


def test_what_a_step_of_penalties_computes_is_bounded_by_the_vocabulary() -> None:
    vocab, length = 400, 1000
    table, counts = counted_stream(vocab, length, [1])
    slots = np.zeros(1, np.intp)
    widths = []
    for step in range(length - 2):
        tokens, found = counts.counts_of(slots, table.length[slots], torch.device("cpu"))
        widths.append(found.shape[1])
        assert widths[-1] == (vocab if tokens is None else tokens.shape[1])
        table.append(slots, np.array([step % 60], np.int32))
    assert widths[0] == 1
    assert set(widths[vocab // LISTED_SHARE :]) == {vocab}
    assert int(found.sum()) == 61 + length - 3 - 1


@pytest.mark.parametrize("distinct", [3, 150])
def test_penalties_compute_what_is_distinct_however_long_the_output_is(distinct: int) -> None:
    vocab, length = 8000, 3000
    table, counts = counted_stream(vocab, length, [vocab - 1] * 500)
    slots = np.zeros(1, np.intp)
    for step in range(length - 600):
        tokens, found = counts.counts_of(slots, table.length[slots], torch.device("cpu"))
        known = 1 + min(step, distinct)
        assert tokens is not None
        assert found.shape == tokens.shape
        assert known <= tokens.shape[1] <= 2 * max(known, REFRESHED_FROM)
        assert len(set(tokens[0, :known].tolist())) == known
        table.append(slots, np.array([step % distinct], np.int32))


def test_widths_shrink_when_the_number_of_distinct_tokens_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is late: until then steps go on with the bound, and no second copy is made."""
    copies = []

    class LateCopy(HostCopy):
        is_late = True

        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            copies.append(self)

        def has_arrived(self) -> bool:
            return not self.is_late

    monkeypatch.setattr(listed_bounds, "HostCopy", LateCopy)
    table, counts = counted_stream(8000, 1000, [7])
    slots = np.zeros(1, np.intp)
    widths = []
    for step in range(300):
        if step == 250:
            copies[0].is_late = False
        _, found = counts.counts_of(slots, table.length[slots], torch.device("cpu"))
        widths.append(found.shape[1])
        assert int(found[0, 0]) == 1 + step  # the only token
        table.append(slots, np.array([7], np.int32))
    assert widths[:250] == list(range(1, 251))
    asked = 2 * REFRESHED_FROM - 1
    assert widths[250] == 1 + 250 - asked
    assert len(copies) == 1 + (widths[-1] >= 2 * REFRESHED_FROM)


@pytest.mark.parametrize("quantum", [0, 0.25], ids=["distinct", "ties"])
def test_the_cut_of_a_row_is_the_same_beside_any_rows_and_on_any_device(quantum: float) -> None:
    rng = np.random.default_rng(21)
    rows, vocab = 60, 3 * SOME_CANDIDATES
    logits = rng.normal(0, 2, (rows, vocab))
    if quantum:
        logits = np.round(logits / quantum) * quantum
    weights = torch.from_numpy(np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32))
    top_k = rng.choice([1, 5, 40, SOME_CANDIDATES, SOME_CANDIDATES + 1, 2 * SOME_CANDIDATES, vocab], rows)
    top_p = rng.choice([0.1, 0.6, 0.9, 0.999, 2.0], rows)
    together = search_step_by_step(weights, top_k, top_p)
    assert torch.equal(together, search_at_once(weights.to(DEVICE), top_k, top_p).cpu())
    for row in range(rows):
        own = slice(row, row + 1)
        assert torch.equal(together[own], search_step_by_step(weights[own], top_k[own], top_p[own]))
        best = np.sort(weights[row].double().numpy())[::-1][: top_k[row]]
        before = (np.cumsum(best) - best) / best.sum()
        assert together[row] == best[np.count_nonzero(before < top_p[row]) - 1]
