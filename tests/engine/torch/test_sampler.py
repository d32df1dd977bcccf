"""The sampler against exact probabilities and a slow reference."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.sampling import SamplingColumns
from penstock.engine.slots import SlotTable
from penstock.engine.torch.sampler import Sampler

from .harness import submit

DRAWS = 20_000
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0], np.float32)
# The 99.99 % quantile of chi-square with 7 degrees of freedom (fewer tokens: fewer degrees, a lower
# quantile). Seeds are fixed: a run either always passes or never does.
CHI_SQUARE_MOST = 29.9


def make(slots: int, vocab: int = len(LOGITS)) -> tuple[SlotTable, SamplingColumns, Sampler]:
    table = SlotTable(slots, 64, [1])
    columns = SamplingColumns(table, vocab)
    return table, columns, Sampler(columns)


def add(table: SlotTable, columns: SamplingColumns, stream: int, prompt: list[int], **sampling: Any) -> int:
    request = submit(stream, prompt, **sampling)
    slot = table.allocate(0, request)
    columns.set(slot, request.sampling)
    return slot


def draws(**sampling: Any) -> np.ndarray:
    """How often each token was drawn in DRAWS rows with seeds of their own."""
    table, columns, sampler = make(DRAWS)
    slots = [add(table, columns, stream, [3], seed=stream * 7919 + 1, **sampling) for stream in range(DRAWS)]
    tokens, _ = sampler.sample(torch.from_numpy(np.tile(LOGITS, (DRAWS, 1))), np.array(slots, np.intp))
    return np.bincount(tokens, minlength=len(LOGITS))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def expected(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Exact probabilities: min-p, then top-k, then top-p, each on what the one before left."""
    probabilities = softmax(LOGITS.astype(np.float64) / temperature)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(parameters: dict[str, float]) -> None:
    counts, probabilities = draws(**parameters), expected(**parameters)  # type: ignore[arg-type]
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    wanted = probabilities[possible] * DRAWS
    assert ((counts[possible] - wanted) ** 2 / wanted).sum() < CHI_SQUARE_MOST


def test_rows_of_mixed_parameters_do_not_disturb_each_other() -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "allowed_token_ids": (4, 5)},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.5, "seed": 3},
    ]
    alone = []
    for stream, setting in enumerate(settings):
        table, columns, sampler = make(1)
        slot = add(table, columns, stream, [3], **setting)
        alone.append(int(sampler.sample(torch.from_numpy(LOGITS[None].copy()), np.array([slot]))[0][0]))
    table, columns, sampler = make(len(settings))
    slots = [add(table, columns, stream, [3], **setting) for stream, setting in enumerate(settings)]
    logits = torch.from_numpy(np.tile(LOGITS, (len(settings), 1)))
    tokens, logprobs = sampler.sample(logits, np.array(slots, np.intp))
    assert tokens.tolist() == alone
    assert alone[0] == 0
    assert alone[2] in (4, 5)
    assert alone[3] == 7
    assert logprobs is not None
    assert logprobs.token.tolist() == [4]
    assert logprobs.ids[0].tolist() == [0, 0, 6]


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.8, 0, 0), (1, 1.5, 0), (1, 0, 0.7), (1.3, 0.4, 0.9)]
)
def test_penalties_are_those_of_a_slow_reference(
    repetition: float, presence: float, frequency: float
) -> None:
    prompt, output = [0, 7, 7], [6, 6, 1]
    table, columns, sampler = make(1)
    slot = add(
        table,
        columns,
        0,
        prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=0,
    )
    for token in output:
        table.settle(np.array([slot]), np.array([token], np.int32))
    logits = LOGITS.copy()
    for token in {*prompt, *output}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in output:
        logits[token] -= frequency
    for token in set(output):
        logits[token] -= presence
    given = torch.from_numpy(LOGITS[None].copy())
    tokens, _ = sampler.sample(given, np.array([slot]))
    assert given[0].numpy() == pytest.approx(logits, abs=1e-6)
    assert int(tokens[0]) == int(logits.argmax())


def test_bad_words_are_never_completed() -> None:
    table, columns, sampler = make(1)
    slot = add(table, columns, 0, [3], bad_words=((0,), (6, 1)))
    logits = torch.from_numpy(LOGITS[None].copy())
    tokens, _ = sampler.sample(logits, np.array([slot]))
    assert int(tokens[0]) == 6
    table.settle(np.array([slot]), np.array([6], np.int32))
    tokens, _ = sampler.sample(torch.from_numpy(LOGITS[None].copy()), np.array([slot]))
    assert int(tokens[0]) == 6  # 0 and, after 6, 1 are banned: 6 is next best
