"""Where traffic goes when an endpoint goes bad, by a clock that the test turns."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.routing.circuit_breaker import MAX_OPEN_S, MIN_REQUESTS
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import prefix_blocks

PER_S = 100.0
"""Requests that come, evenly spaced."""
WEIGHTS = {"queue": 2.0, "running": 1.0, "kv": 1.0, "prefix": 2.0, "session": 2.0}
"""The default of ``--scorers``."""
TTFT_S = 0.3
"""When longer replies have their first token."""
Answer = Callable[[int, float], tuple[float, Outcome]]
"""(endpoint, time) to how long its answer takes and what it is."""


class Fleet:
    """Three endpoints, requests that come at times, answers that come later. Nothing is scraped."""

    def __init__(self, answer: Answer, *, blocks: bool = False) -> None:
        self.endpoints = [Endpoint(f"http://10.0.0.{number}:8000") for number in range(3)]
        self.sent: list[tuple[float, int]] = []
        self.seen: list[tuple[float, str]] = []
        """What clients saw, after at most two retries."""
        self._answer = answer
        self._picker = Picker(WEIGHTS, rng=random.Random(1))
        self._blocks = prefix_blocks("m", b"x" * 2000) if blocks else []
        self._order = itertools.count()
        self._answers: list[tuple[float, int, float, PickRequest, Endpoint, Outcome | None]] = []
        """Ends, and first tokens (None)."""

    def run(self, until: float) -> None:
        for number in range(int(until * PER_S)):
            now = number / PER_S
            self._settle(now)
            self._send(PickRequest(blocks=self._blocks), now)
        self._settle(until)

    def share(self, endpoint: int, begin: float, end: float) -> float:
        """Of the requests sent in that time."""
        to = [number for at, number in self.sent if begin <= at < end]
        return to.count(endpoint) / len(to)

    def _send(self, request: PickRequest, now: float) -> None:
        try:
            endpoint = self._picker.pick(request, self.endpoints, now)
        except NoEndpointError as refusal:
            self.seen.append((now, refusal.reason))
            return
        number = self.endpoints.index(endpoint)
        self.sent.append((now, number))
        endpoint.request_sent(request.tokens, now)
        request.tried.add(endpoint)
        takes, outcome = self._answer(number, now)
        answer = (now + takes, next(self._order), now, request, endpoint, outcome)
        heapq.heappush(self._answers, answer)
        if outcome is Outcome.OK and takes > TTFT_S:
            token = (now + TTFT_S, next(self._order), now, request, endpoint, None)
            heapq.heappush(self._answers, token)

    def _settle(self, now: float) -> None:
        while self._answers and self._answers[0][0] <= now:
            at, _, sent_at, request, endpoint, outcome = heapq.heappop(self._answers)
            if outcome is None:
                endpoint.breaker.record_success(at, sent_at)
                continue
            endpoint.request_ended(request.tokens)
            endpoint.breaker.record_outcome(outcome, at, sent_at, had_token=at - sent_at > TTFT_S)
            if outcome is Outcome.NETWORK_ERROR and len(request.tried) < 3:
                self._send(request, at)
            else:
                self.seen.append((at, outcome.value))


def bad_from(second: float, takes: float, outcome: Outcome, *bad: int) -> Answer:
    def answer(endpoint: int, now: float) -> tuple[float, Outcome]:
        if endpoint in bad and now >= second:
            return takes, outcome
        return 0.2, Outcome.OK

    return answer


DEAD = bad_from(2.0, 0.001, Outcome.NETWORK_ERROR, 0)
FAILING = bad_from(2.0, 0.001, Outcome.MODEL_SERVER_ERROR, 0)
STALLED = bad_from(2.0, 60.0, Outcome.NETWORK_ERROR, 0)
SLOW = bad_from(2.0, 5.0, Outcome.OK, 0)


@pytest.mark.parametrize("blocks", [False, True], ids=["different prompts", "one prompt"])
@pytest.mark.parametrize("answer", [DEAD, FAILING, STALLED, SLOW], ids=["dead", "failing", "stalled", "slow"])
def test_traffic_leaves_within_a_second(answer: Answer, blocks: bool) -> None:
    """Also where prefix affinity pulls it back. One that is silent is known by what waits there."""
    fleet = Fleet(answer, blocks=blocks)
    fleet.run(10.0)
    assert fleet.share(0, 0.0, 2.0) > 0.2
    assert fleet.share(0, 3.0, 10.0) < 0.07


def test_a_dead_endpoint_is_not_noticed_by_clients() -> None:
    fleet = Fleet(DEAD)
    fleet.run(10.0)
    assert {told for _, told in fleet.seen} == {"ok"}


def test_a_failing_endpoint_shows_in_a_few_replies() -> None:
    """Half of at least ten open the breaker where good replies from before still end in between; after that
    there are probes after 1, 3 and 6 seconds."""
    fleet = Fleet(FAILING)
    fleet.run(10.0)
    assert sum(told == "model_server_error" for _, told in fleet.seen) <= MIN_REQUESTS + 3


def test_long_replies_from_before_do_not_hide_failures() -> None:
    """They take six seconds and end well while new requests fail at once."""

    def answer(endpoint: int, now: float) -> tuple[float, Outcome]:
        failing = endpoint == 0 and now >= 6.0
        return (0.001, Outcome.MODEL_SERVER_ERROR) if failing else (6.0, Outcome.OK)

    fleet = Fleet(answer)
    fleet.run(12.0)
    assert fleet.share(0, 7.0, 12.0) < 0.02


def test_an_endpoint_that_comes_and_goes() -> None:
    """Half of the time it is away: clients see nothing of that, and it gets less than its share."""

    def answer(endpoint: int, now: float) -> tuple[float, Outcome]:
        away = endpoint == 0 and now % 0.7 < 0.35
        return (0.001, Outcome.NETWORK_ERROR) if away else (0.05, Outcome.OK)

    fleet = Fleet(answer)
    fleet.run(30.0)
    assert {told for _, told in fleet.seen} == {"ok"}
    assert 0.005 < fleet.share(0, 0.0, 30.0) < 0.2


def test_an_outage_of_all_ends_with_its_cause() -> None:
    """While replies take longer than anyone would wait for a probe."""

    def answer(endpoint: int, now: float) -> tuple[float, Outcome]:
        return (0.001, Outcome.NETWORK_ERROR) if 2.0 <= now < 3.0 else (45.0, Outcome.OK)

    fleet = Fleet(answer)
    fleet.run(60.0)
    during = {told for at, told in fleet.seen if 2.1 <= at < 3.0}
    assert during == {"network_error"}
    assert all(told == "ok" for at, told in fleet.seen if at >= 3.01)
    assert sum(at >= 3.01 for at, _ in fleet.sent) == pytest.approx(57 * PER_S, abs=5)
    assert min(fleet.share(number, 5.0, 60.0) for number in range(3)) > 0.2


def test_an_outage_of_one_is_over_soon_after_its_cause() -> None:
    def answer(endpoint: int, now: float) -> tuple[float, Outcome]:
        away = endpoint == 0 and 2.0 <= now < 12.0
        return (0.001, Outcome.NETWORK_ERROR) if away else (45.0, Outcome.OK)

    fleet = Fleet(answer)
    fleet.run(30.0)
    assert {told for _, told in fleet.seen} <= {"ok"}
    assert fleet.share(0, 12.0 + MAX_OPEN_S + 1.0, 30.0) > 0.3
