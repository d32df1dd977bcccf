"""Picks by columns, against plain ones that visit each endpoint."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.gateway.routing.cached_prompts import CachedPrompt
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_columns import FIRST_ROWS, EndpointColumns
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest
from penstock.gateway.routing.picker import AFFINITY_SLACK, Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_BYTES, prefix_blocks
from penstock.gateway.routing.usable_endpoints import PANIC_SHARE, PickerLimits

NOW = 100.0
LIMITS = PickerLimits()
WEIGHTS = {"queue": 2.0, "running": 1.0, "kv": 1.0, "tokens": 0.5, "lora": 0.5, "slo": 1.0}


def changed_at_random(endpoint: Endpoint, rng: random.Random) -> None:
    match rng.randrange(9):
        case 0:
            names = frozenset(rng.sample(["m", "n", "o"], rng.randrange(3)))
            load = EndpointLoad(rng.randrange(8), rng.randrange(20), rng.random(), names, rng.randrange(3))
            endpoint.scrape_succeeded(load, NOW - rng.choice([0.0, 4.0, 6.0]))
        case 1:
            endpoint.scrape_had_no_load()
        case 2:
            endpoint.scrape_failed(connected=rng.random() < 0.5)
        case 3:
            endpoint.add_ttft(rng.random())
        case 4:
            endpoint.breaker.record_unavailable(NOW - rng.choice([0.5, 5.0]), NOW)
        case 5:
            endpoint.breaker.record_success(NOW - 0.5, NOW - 0.5)
        case 6:
            endpoint.backoff.refused(rng.choice([429, 503]), rng.random(), rng.choice("ab"), NOW - 0.5)
        case _:
            endpoint.request_sent(rng.randrange(100), NOW)
            if rng.random() < 0.3:
                endpoint.request_ended(rng.randrange(50))


def usable(request: PickRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    present = [each for each in endpoints if not each.is_away]
    untried = [each for each in present if each not in request.tried]
    working = [each for each in present if each.breaker.closed]
    left = [each for each in working if each not in request.tried]
    if (
        len(working) >= PANIC_SHARE * len(endpoints)
        or (request.tried and left)
        or any(has_room(each) for each in left)
    ):
        untried = [each for each in untried if each.breaker.allows(NOW)]
    readable = [each for each in untried if each.is_readable]
    chosen = readable if 2 * len(readable) >= len(untried) else untried
    return [each for each in chosen if each.backoff.until_for(request.client, request.model) <= NOW]


def has_room(endpoint: Endpoint) -> bool:
    load = endpoint.fresh_load(NOW)
    return load is not None and load.waiting < LIMITS.waiting and load.kv_used < LIMITS.kv_used


def requests_at(endpoint: Endpoint) -> int:
    load = endpoint.load
    return max(load.waiting + load.running + endpoint.sent_since_scrape, endpoint.in_flight)


def fewest(counts: list[int], few: int = 8) -> list[float]:
    low, high = min(counts), max(counts)
    return [1.0 if high == low else (high - count) / max(high - low, few) for count in counts]


def scores_of(request: PickRequest, endpoints: list[Endpoint]) -> dict[Endpoint, float]:
    assert request.ttft_slo_s is not None
    totals = [0.0] * len(endpoints)
    columns = {
        "queue": fewest([each.load.waiting + each.sent_since_scrape for each in endpoints]),
        "running": fewest([requests_at(each) for each in endpoints]),
        "kv": [1.0 - each.load.kv_used for each in endpoints],
        "tokens": fewest([each.in_flight_tokens for each in endpoints], few=4096),
        "lora": [
            1.0
            if request.model in each.load.adapters
            else 0.5
            if len(each.load.adapters) < each.load.max_adapters
            else 0.0
            for each in endpoints
        ],
        "slo": [max(0.0, 1.0 - (each.ttft_s or 0.0) / request.ttft_slo_s) for each in endpoints],
    }
    for name, weight in WEIGHTS.items():
        totals = [total + weight * score for total, score in zip(totals, columns[name], strict=True)]
    return dict(zip(endpoints, totals, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_picks_are_those_of_a_plain_picker(seed: int) -> None:
    rng = random.Random(seed)
    endpoints = [Endpoint(f"http://{number}") for number in range(rng.choice([3, 9, 80]))]
    picker = Picker(WEIGHTS)
    for _ in range(300):
        for _ in range(rng.randrange(4)):
            changed_at_random(rng.choice(endpoints), rng)
        some = rng.sample(endpoints, 2 + rng.randrange(len(endpoints) - 2))
        listed = rng.choice([endpoints, endpoints, some])
        request = PickRequest(rng.choice("mx"), client=rng.choice("ab"), ttft_slo_s=0.5)
        if rng.random() < 0.2:
            request.tried = set(rng.sample(endpoints, 2))
        candidates = usable(request, listed)
        if not candidates:
            with pytest.raises(NoEndpointError):
                picker.pick(request, listed, NOW)
            continue
        ranked = picker.ranked(request, listed, NOW, len(listed))
        assert set(ranked) == set(candidates)
        scores = scores_of(request, candidates)
        found = [scores[each] for each in ranked]
        assert found == pytest.approx(sorted(found, reverse=True))


def test_affinity_counts_where_the_load_allows_it() -> None:
    endpoints = [Endpoint(f"http://{number}") for number in range(300)]
    picker = Picker({"prefix": 1.0})
    prompt = prefix_blocks("m", b"x" * 9 * BLOCK_BYTES)
    for number in range(0, 300, 2):
        picker.index.note(prompt[: 1 + number // 40], endpoints[number])
    lengths = picker.index.matched(prompt, endpoints)
    assert lengths == [0 if number % 2 else 1 + number // 40 for number in range(300)]
    longest = [each for each, length in zip(endpoints, lengths, strict=True) if length == max(lengths)]
    assert picker.pick(PickRequest(blocks=prompt), endpoints, NOW) in longest
    for each in longest:
        each.in_flight = AFFINITY_SLACK + 1
    assert picker.pick(PickRequest(blocks=prompt), endpoints, NOW) not in longest


def test_rows_are_taken_again() -> None:
    columns = EndpointColumns()
    first = [Endpoint(f"http://{number}") for number in range(3 * FIRST_ROWS)]
    first[5].scrape_succeeded(EndpointLoad(7, adapters=frozenset({"m"})), NOW)
    columns.rows(first)
    assert columns.waiting[columns.row(first[5])] == 7
    assert columns.with_adapter("m") == {columns.row(first[5])}
    for each in first:
        columns.forget(each)
    assert columns.with_adapter("m") == set()
    first[5].request_sent(1, NOW)
    again = [Endpoint(f"http://again-{number}") for number in range(3 * FIRST_ROWS)]
    rows = columns.rows(again)
    assert sorted(rows) == list(range(3 * FIRST_ROWS))
    assert not columns.waiting[rows].any()
    assert not columns.in_flight[rows].any()


def test_what_is_known_of_an_endpoint_that_has_left_is_no_harm() -> None:
    endpoints = [Endpoint("http://a"), Endpoint("http://b")]
    gone = [Endpoint(f"http://gone-{number}") for number in range(2 * FIRST_ROWS)]
    picker = Picker({"prefix": 1.0, "queue": 1.0})
    prompt = CachedPrompt(b"", shares=dict.fromkeys(gone, 1.0) | {endpoints[1]: 0.5})
    request = PickRequest(prompt=prompt, tried={gone[0]})
    assert picker.pick(request, endpoints, NOW) is endpoints[1]
