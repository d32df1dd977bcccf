"""Every field of every route that has a body, with hostile values, alone and combined."""

from __future__ import annotations

import psutil
import pytest

from tests.gateway.processes import Gateway
from tests.hostile.routes.attack import send_all, watched
from tests.hostile.routes.cases import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    POOLED,
    REQUESTS,
    RESPONSES,
    Case,
    couples,
    pairs,
    sample,
    singles,
)
from tests.hostile.routes.conftest import processes_of
from tests.integration.server import Server

FAST_CASES = {
    CHAT: 60,
    COMPLETIONS: 60,
    RESPONSES: 60,
    MESSAGES: 60,
    "/v1/messages/count_tokens": 20,
    "/tokenize": 40,
    "/detokenize": 20,
}
FAST_S = 1.5
SLOW_S = 90.0
"""Time limit of a group; the machine decides how many cases it has time for."""
FILLING_PASSES = 3
"""They fill the tokenizer's caches, one per thread, which are bounded."""


def attack(server: Server, url: str, cases: list[Case], seconds: float, *others: psutil.Process) -> None:
    with watched(url, [*processes_of(server), *others]) as harm:
        faults = send_all(url, cases, seconds)
    assert not faults.found, str(faults)
    harm[0].check(grammars=any(case.constrained for case in cases))
    assert faults.statuses.get(200) or len(cases) < 50, f"all cases are refused: {faults}"


def fast_cases(path: str, seed: int) -> list[Case]:
    count = FAST_CASES.get(path, 20)
    mixed = [*sample(list(singles(path)), count, seed), *sample(list(pairs(path)), count, seed)]
    return sample([*mixed, *sample(list(couples(path)), count // 2, seed)], len(mixed) * 2, seed)


@pytest.mark.parametrize("path", sorted(REQUESTS.keys() - POOLED))
def test_some_hostile_bodies(demo: Server, path: str) -> None:
    attack(demo, demo.url, fast_cases(path, 1), FAST_S)


@pytest.mark.parametrize("path", sorted(REQUESTS.keys() & POOLED))
def test_some_hostile_bodies_of_vectors(vectors: Server, path: str) -> None:
    attack(vectors, vectors.url, fast_cases(path, 1), FAST_S)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_some_hostile_bodies_through_the_gateway(demo: Server, front: Gateway, path: str) -> None:
    attack(demo, front.url, fast_cases(path, 2), FAST_S, psutil.Process(front.process.pid))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", sorted(REQUESTS.keys() & POOLED))
def test_every_hostile_value_of_vectors(vectors: Server, path: str) -> None:
    attack(vectors, vectors.url, sample(list(singles(path)), 1 << 30), SLOW_S / 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", sorted(REQUESTS.keys() - POOLED))
def test_every_hostile_value(demo: Server, path: str) -> None:
    cases = sample(list(singles(path)), 1 << 30)
    plain = [case for case in cases if not case.constrained]
    for _ in range(FILLING_PASSES):
        send_all(demo.url, plain, SLOW_S / 2)
    attack(demo, demo.url, plain, SLOW_S / 2)
    attack(demo, demo.url, [case for case in cases if case.constrained], SLOW_S / 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_hostile_values_in_pairs(demo: Server, path: str) -> None:
    attack(demo, demo.url, [*sample(list(couples(path)), 300), *sample(list(pairs(path)), 1 << 30)], SLOW_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_hostile_values_through_the_gateway(demo: Server, front: Gateway, path: str) -> None:
    cases = [*sample(list(singles(path)), 800), *sample(list(pairs(path)), 400)]
    attack(demo, front.url, sample(cases, 1 << 30), SLOW_S / 2, psutil.Process(front.process.pid))
