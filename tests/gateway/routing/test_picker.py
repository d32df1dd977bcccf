"""Which endpoint is picked, and when none is."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.gateway.routing.circuit_breaker import FIRST_OPEN_S
from penstock.gateway.routing.endpoint import STALE_S, Endpoint, EndpointLoad
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest
from penstock.gateway.routing.picker import SCORERS, Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_BYTES, prefix_blocks
from penstock.gateway.routing.usable_endpoints import PickerLimits

NOW = 100.0


def endpoint(name: str, load: EndpointLoad | None = None, **counts: int) -> Endpoint:
    made = Endpoint(f"http://{name}", **counts)  # type: ignore[arg-type]
    made.scrape_succeeded(load or EndpointLoad(), NOW)
    for field, value in counts.items():
        setattr(made, field, value)
    return made


def picker(**weights: float) -> Picker:
    return Picker(weights, rng=random.Random(0))


@pytest.mark.parametrize(
    ("scorer", "better", "worse"),
    [
        ("queue", endpoint("a", EndpointLoad(waiting=1)), endpoint("b", EndpointLoad(waiting=2))),
        (
            "queue",
            endpoint("a", EndpointLoad(waiting=1)),
            endpoint("b", EndpointLoad(waiting=1), sent_since_scrape=1),
        ),
        ("running", endpoint("a", EndpointLoad(running=3)), endpoint("b", EndpointLoad(running=5))),
        ("running", endpoint("a", in_flight=1), endpoint("b", in_flight=2)),
        ("kv", endpoint("a", EndpointLoad(kv_used=0.2)), endpoint("b", EndpointLoad(kv_used=0.4))),
        ("tokens", endpoint("a", in_flight_tokens=10), endpoint("b", in_flight_tokens=20)),
        (
            "lora",
            endpoint("a", EndpointLoad(adapters=frozenset({"m"}))),
            endpoint("b", EndpointLoad(max_adapters=2)),
        ),
        (
            "lora",
            endpoint("a", EndpointLoad(max_adapters=1)),
            endpoint("b", EndpointLoad(adapters=frozenset({"x"}))),
        ),
    ],
)
def test_load_scorers_prefer_the_better_one(scorer: str, better: Endpoint, worse: Endpoint) -> None:
    for endpoints in ([better, worse], [worse, better]):
        assert picker(**{scorer: 1.0}).pick(PickRequest("m"), endpoints, NOW) is better


def test_slo_prefers_headroom() -> None:
    slow, quick = endpoint("a"), endpoint("b")
    slow.add_ttft(0.9)
    quick.add_ttft(0.1)
    assert picker(slo=1.0).pick(PickRequest(ttft_slo_s=1.0), [slow, quick], NOW) is quick


def test_sessions_stay_where_they_are() -> None:
    endpoints = [endpoint(name) for name in "abcd"]
    chooser = picker(session=1.0)
    first = chooser.pick(PickRequest(session="s"), endpoints, NOW)
    assert all(chooser.pick(PickRequest(session="s"), endpoints, NOW) is first for _ in range(20))
    chooser.forget(first)
    rest = [each for each in endpoints if each is not first]
    assert chooser.pick(PickRequest(session="s"), rest, NOW) in rest


def test_prompts_go_where_their_beginning_is() -> None:
    endpoints = [endpoint(name) for name in "abcd"]
    chooser = picker(prefix=2.0, running=1.0)
    blocks = prefix_blocks("m", b"x" * 4 * BLOCK_BYTES)
    first = chooser.pick(PickRequest(blocks=blocks), endpoints, NOW)
    first.request_sent(100, NOW)
    longer = prefix_blocks("m", b"x" * 4 * BLOCK_BYTES + b"y" * BLOCK_BYTES)
    assert chooser.pick(PickRequest(blocks=longer), endpoints, NOW) is first


def test_affinity_does_not_overload() -> None:
    busy, idle = endpoint("a", in_flight=30), endpoint("b", in_flight=2)
    chooser = picker(session=9.0, running=1.0)
    chooser.pick(PickRequest(session="s"), [busy], NOW)
    assert chooser.pick(PickRequest(session="s"), [busy, idle], NOW) is idle


def test_equal_endpoints_share() -> None:
    endpoints = [endpoint(name) for name in "abcd"]
    chooser = picker(running=1.0)
    counts: Counter[str] = Counter()
    for _ in range(400):
        chosen = chooser.pick(PickRequest(), endpoints, NOW)
        chosen.request_sent(1, NOW)
        counts[chosen.url] += 1
    assert set(counts.values()) == {100}


def test_failed_endpoints_are_left_out() -> None:
    good, broken, down, tried = (endpoint(name) for name in "abcd")
    for _ in range(3):
        broken.breaker.record_unavailable(NOW, NOW)
    down.scrape_failed()
    down.scrape_failed()
    for _ in range(20):
        request = PickRequest(tried={tried})
        assert picker(queue=1.0).pick(request, [good, broken, down, tried], NOW) is good


def test_endpoints_that_answer_with_errors_are_the_last_resort() -> None:
    good, bad, worse = (endpoint(name) for name in "abc")
    for each in (bad, worse):
        for _ in range(3):
            each.breaker.record_failure(NOW, NOW)
    for _ in range(20):
        assert picker(queue=1.0).pick(PickRequest(), [good, bad, worse], NOW) is good
    assert picker(queue=1.0).pick(PickRequest(), [bad, worse], NOW) in (bad, worse)
    assert refusal(PickRequest(tried={good}), [good, bad]).reason == "all_failed"


def test_an_endpoint_that_cannot_be_reached_is_left_out() -> None:
    gone = endpoint("a")
    gone.scrape_failed(connected=False)
    assert picker(queue=1.0).pick(PickRequest(), [gone], NOW) is gone, "once may be chance"
    gone.scrape_failed(connected=False)
    assert refusal(PickRequest(), [gone]).reason == "none_ready"
    gone.scrape_succeeded(EndpointLoad(), NOW)
    assert picker(queue=1.0).pick(PickRequest(), [gone], NOW) is gone


@pytest.mark.parametrize(("unreadable", "used"), [(1, 3), (2, 2), (3, 4), (4, 4)])
def test_unless_most_cannot_be_scraped_those_are_left_out(unreadable: int, used: int) -> None:
    """What ails the scrapes of most need not ail requests."""
    endpoints = [endpoint(name) for name in "abcd"]
    for each in endpoints[:unreadable]:
        each.scrape_failed()
        each.scrape_failed()
    chooser = picker(queue=1.0)
    assert len({chooser.pick(PickRequest(), endpoints, NOW) for _ in range(200)}) == used


def refusal(request: PickRequest, endpoints: list[Endpoint]) -> NoEndpointError:
    with pytest.raises(NoEndpointError) as caught:
        picker(queue=1.0).pick(request, endpoints, NOW)
    return caught.value


def test_none_ready() -> None:
    away = endpoint("a")
    away.scrape_failed(connected=False)
    away.scrape_failed(connected=False)
    assert (refusal(PickRequest(), [away]).status, refusal(PickRequest(), []).reason) == (503, "none_ready")


@pytest.mark.parametrize(
    ("broken", "healthy_load", "used"),
    [
        (2, EndpointLoad(), "cd"),
        (3, EndpointLoad(), "d"),
        (3, EndpointLoad(waiting=99), "abcd"),
        (3, None, "abcd"),
        (4, EndpointLoad(), "abcd"),
    ],
    ids=["half", "one with room", "one that is full", "one whose load is unknown", "none"],
)
def test_all_are_used_if_few_are_healthy(broken: int, healthy_load: EndpointLoad | None, used: str) -> None:
    endpoints = [endpoint(name, healthy_load) for name in "abcd"]
    for each in endpoints:
        if healthy_load is None:
            each.scrape_had_no_load()
    for each in endpoints[:broken]:
        for _ in range(3):
            each.breaker.record_unavailable(NOW, NOW)
    chooser = picker(slo=1.0)
    assert {chooser.pick(PickRequest(), endpoints, NOW).url[-1] for _ in range(200)} == set(used)
    if 0 < broken < 4:
        again = PickRequest(tried={endpoints[0]})
        found = {chooser.pick(again, endpoints, NOW).url[-1] for _ in range(200)}
        assert found == set("abcd"[broken:]), "after a failure only healthy ones"
    later = NOW + FIRST_OPEN_S
    found = {chooser.pick(PickRequest(), endpoints, later).url[-1] for _ in range(200)}
    assert found == set("abcd"), "some get probes"


def test_all_tried() -> None:
    only = endpoint("a")
    assert refusal(PickRequest(tried={only}), [only]).reason == "all_failed"


def test_endpoints_that_want_no_requests_get_none_and_clients_learn_when_they_do() -> None:
    full, busy, free = (endpoint(name) for name in "abc")
    full.backoff.refused(503, 9.0, "x", NOW)
    busy.backoff.refused(429, 4.0, "me", NOW)
    chooser = picker(queue=1.0)
    me, other = PickRequest(client="me"), PickRequest(client="other")
    assert {chooser.pick(me, [full, busy, free], NOW) for _ in range(50)} == {free}
    assert {chooser.pick(other, [full, busy, free], NOW) for _ in range(50)} == {busy, free}
    refused = refusal(me, [full, busy])
    assert (refused.status, refused.reason, refused.retry_after_s) == (429, "backing_off", 4.0)
    headers = dict(refused.as_error().headers)
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"4", b"4000")
    assert chooser.least_backoff_s(me, [full, busy, free], NOW) == 4.0
    assert chooser.least_backoff_s(other, [full, busy, free], NOW) == 9.0
    assert chooser.pick(me, [full, busy], NOW + 4.0) is busy


def test_a_subset_is_obeyed() -> None:
    endpoints = [endpoint("a"), endpoint("b", EndpointLoad(waiting=9))]
    assert picker(queue=1.0).pick(PickRequest(subset=frozenset({"http://b"})), endpoints, NOW) is endpoints[1]
    assert refusal(PickRequest(subset=frozenset({"http://c"})), endpoints).status == 503


def test_low_priority_is_shed_when_all_are_saturated() -> None:
    full = [
        endpoint("a", EndpointLoad(waiting=PickerLimits().waiting)),
        endpoint("b", EndpointLoad(kv_used=1.0)),
    ]
    assert refusal(PickRequest(priority=-1), full).status == 429
    assert picker(queue=1.0).pick(PickRequest(priority=0), full, NOW) in full
    assert picker(queue=1.0).pick(PickRequest(priority=-1), [*full, endpoint("c")], NOW).url == "http://c"


def test_a_stale_load_does_not_shed() -> None:
    full = endpoint("a", EndpointLoad(waiting=99))
    chooser = picker(queue=1.0)
    assert chooser.pick(PickRequest(priority=-1), [full], NOW + STALE_S + 1) is full


def test_every_scorer_can_be_asked_for() -> None:
    endpoints = [endpoint("a"), endpoint("b")]
    assert Picker(dict.fromkeys(SCORERS, 1.0)).pick(PickRequest(), endpoints, NOW) in endpoints
