"""Requests that wait in the gateway for a place: who gets it, who is refused, who leaves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

import pytest

from penstock.gateway.admission import flow_control
from penstock.gateway.admission.drain_rate import WINDOW_S, DepartureRate
from penstock.gateway.admission.flow_control import GUARD_INTERVAL, FlowControl, FlowLimits, FlowRequest
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_capacity import CandidateCapacity, EndpointCapacity
from penstock.http.errors import ApiError
from penstock.http.request import ClientGone

SMALL = FlowLimits(most_requests=3, most_bytes=1000, timeout_s=30.0)


class Fleet:
    """Endpoints with one place each, behind flow control. The clock is the test's."""

    def __init__(self, count: int = 1, limits: FlowLimits = SMALL) -> None:
        self.now = 100.0
        self.endpoints = [Endpoint(f"http://{number}") for number in range(count)]
        places = EndpointCapacity(1, most_waiting=5, most_kv_used=0.95)
        self.flow = FlowControl(limits, lambda: self.now)
        self.places = defaultdict(lambda: CandidateCapacity(places, lambda: self.endpoints))
        """By key."""
        self.sent: list[str] = []
        self.running: list[tuple[FlowRequest, Endpoint]] = []

    async def run(
        self, request: FlowRequest, gone: asyncio.Future[None] | None = None, key: str = "all"
    ) -> FlowRequest:
        await self.flow.enter(request, key, self.places[key].have_free, gone)
        endpoint = min(self.endpoints, key=lambda each: each.in_flight)
        endpoint.request_sent(1, self.now)
        self.flow.sent(request)
        self.sent.append(request.flow)
        self.running.append((request, endpoint))
        return request

    async def start(
        self, flow: str, gone: asyncio.Future[None] | None = None, key: str = "all", **fields: float
    ) -> asyncio.Task[FlowRequest]:
        request = FlowRequest(flow, **fields)  # type: ignore[arg-type]
        task = asyncio.ensure_future(self.run(request, gone, key))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is retrieved
        await settled()
        return task

    async def end_one(self, tokens: float | None = None) -> None:
        self.now += 0.001
        request, endpoint = self.running.pop(0)
        endpoint.request_ended(1)
        self.flow.ended(request, tokens)
        await settled()

    async def check(self, later: float = 0.0) -> None:
        """What the timer does."""
        self.now += later
        self.flow._check()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def on_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def with_cleanup() -> None:
            await test()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[arg-type]
                task.cancel()

        asyncio.run(with_cleanup())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def refusal(task: asyncio.Task[FlowRequest]) -> tuple[int, str, float]:
    """Status, code and Retry-After in seconds."""
    with pytest.raises(ApiError) as caught:
        task.result()
    retry = dict(caught.value.headers).get(b"retry-after-ms", b"0")
    return caught.value.status, str(caught.value.code), int(retry) / 1000


@on_loop
async def test_with_a_free_place_nothing_waits() -> None:
    fleet = Fleet(2)
    for _ in range(2):
        assert (await fleet.start("a")).done()
    assert fleet.flow.waiting == 0
    assert not (await fleet.start("a")).done()
    assert fleet.flow.waiting == 1


@on_loop
async def test_places_go_to_the_flows_in_turn_and_to_priorities_first() -> None:
    fleet = Fleet()
    fleet.flow._limits = FlowLimits()
    await fleet.start("first")
    for _ in range(3):
        await fleet.start("a", size=10)
    await fleet.start("b")
    await fleet.start("c", priority=1)
    assert fleet.flow.waiting_by_priority() == {0: (4, 30), 1: (1, 0)}
    assert fleet.flow.waiting_bytes == 30
    for _ in range(6):
        await fleet.end_one(tokens=1.0)
    assert fleet.sent == ["first", "c", "a", "b", "a", "a"]
    assert (fleet.flow.waiting, fleet.flow.waiting_bytes) == (0, 0)


@on_loop
async def test_what_waits_in_all_workers_is_estimated() -> None:
    fleet = Fleet(limits=FlowLimits(share=0.5))
    for _ in range(3):
        await fleet.start("a")
    assert [fleet.flow.queued(key) for key in ("all", "others")] == [4.0, 0.0]


@on_loop
async def test_requests_for_several_models_of_the_same_endpoints_have_one_order() -> None:
    fleet = Fleet()
    fleet.flow._limits = FlowLimits()
    await fleet.start("first")
    for _ in range(3):
        await fleet.start("a", key="base")
    for _ in range(2):
        await fleet.start("b", key="adapter")
    await fleet.start("c", key="other", priority=1)
    for _ in range(6):
        await fleet.end_one(tokens=1.0)
        assert fleet.endpoints[0].in_flight == 1, "a place that is free is granted once"
    assert fleet.sent == ["first", "c", "a", "b", "a", "b", "a"]


@on_loop
async def test_who_comes_later_does_not_take_the_place_of_those_that_wait_for_another_model() -> None:
    fleet = Fleet()
    await fleet.start("a")
    waiting = await fleet.start("b", key="base")
    fleet.endpoints.append(Endpoint("http://new"))
    fleet.now += 0.001
    late = await fleet.start("b", key="adapter")
    assert waiting.done()
    assert not late.done()


@on_loop
async def test_places_that_come_free_together_are_granted_once() -> None:
    fleet = Fleet(2)
    fleet.flow._limits = FlowLimits()
    for key in ("base", "base", "base", "base", "adapter", "adapter"):
        await fleet.start("a", key=key)
    for request, endpoint in fleet.running[:2]:
        fleet.now += 0.001
        endpoint.request_ended(1)
        fleet.flow.ended(request, None)
    await settled()
    assert [endpoint.in_flight for endpoint in fleet.endpoints] == [1, 1]
    assert fleet.flow.waiting == 2


@pytest.mark.parametrize("key", ["base", "adapter"])
def test_lower_priorities_do_not_starve(key: str) -> None:
    """Neither beside requests for the same model nor beside those for another one of the same endpoints."""

    @on_loop
    async def run() -> None:
        fleet = Fleet()
        fleet.flow._limits = FlowLimits()
        await fleet.start("high")
        for count in range(3 * GUARD_INTERVAL):
            await fleet.start("high", key="base", priority=1)
            if count < 5:
                await fleet.start("low", key=key)
            fleet.now += 0.001
        for _ in range(3 * GUARD_INTERVAL):
            await fleet.end_one()
        assert fleet.sent.count("low") == 3

    run()


@on_loop
async def test_a_place_is_promised_once() -> None:
    """Two requests that were granted places have not been sent yet when a third one asks."""
    fleet = Fleet()
    request = FlowRequest("a")
    await fleet.flow.enter(request, "all", fleet.places["all"].have_free)
    late = await fleet.start("b")
    assert not late.done()
    fleet.flow.ended(request, None)  # it was never sent
    await settled()
    assert late.done()


@on_loop
async def test_places_that_no_ended_request_left_are_found() -> None:
    """Another gateway's request ended, or an endpoint was added."""
    fleet = Fleet()
    await fleet.start("a")
    late = await fleet.start("b")
    fleet.endpoints.append(Endpoint("http://new"))
    await fleet.check(later=0.05)
    assert late.done()


@on_loop
async def test_without_a_ready_endpoint_nothing_waits() -> None:
    """The picker says why there is none."""
    fleet = Fleet()
    fleet.endpoints.clear()
    await asyncio.wait_for(fleet.flow.enter(FlowRequest("a"), "all", fleet.places["all"].have_free), 60)


@on_loop
async def test_deadlines() -> None:
    """The option's, or the client's own if it is shorter."""
    fleet = Fleet()
    await fleet.start("a")
    hasty, other = await fleet.start("b", timeout_s=2.0), await fleet.start("c", timeout_s=99.0)
    await fleet.check(later=2.0)
    assert refusal(hasty) == (429, "queue_timeout", 1.0)
    assert not other.done()
    await fleet.check(later=28.0)
    assert refusal(other)[:2] == (429, "queue_timeout")
    assert fleet.flow.waiting == 0


@on_loop
async def test_a_request_does_not_wait_beyond_its_own_end() -> None:
    fleet = Fleet()
    await fleet.start("a")
    long, longer = await fleet.start("b", deadline=101.0), await fleet.start("c", deadline=102.0)
    await fleet.check(later=1.0)
    assert refusal(long) == (429, "queue_timeout", 1.0)
    other = await fleet.start("d")
    fleet.now += 1.0
    await fleet.end_one()
    assert refusal(longer)[:2] == (429, "queue_timeout"), "a place is of no use to it"
    assert other.done()
    assert fleet.sent == ["a", "d"]


@on_loop
async def test_a_client_that_leaves_gives_its_place_in_the_queue_up() -> None:
    fleet = Fleet()
    await fleet.start("a")
    gone = asyncio.get_running_loop().create_future()
    leaver, stayer = await fleet.start("b", gone), await fleet.start("c")
    gone.set_result(None)
    await settled()
    with pytest.raises(ClientGone):
        leaver.result()
    assert fleet.flow.waiting == 1
    await fleet.end_one()
    assert stayer.done()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_client_that_leaves_as_it_is_granted_a_place(cancelled: bool) -> None:
    @on_loop
    async def run() -> None:
        fleet = Fleet()
        await fleet.start("a")
        gone = asyncio.get_running_loop().create_future()
        leaver, stayer = await fleet.start("b", None if cancelled else gone), await fleet.start("c")
        if cancelled:
            asyncio.get_running_loop().call_soon(leaver.cancel)
        else:
            asyncio.get_running_loop().call_soon(gone.set_result, None)
        await fleet.end_one()
        assert leaver.cancelled() if cancelled else isinstance(leaver.exception(), ClientGone)
        assert stayer.done()
        await fleet.end_one()
        assert (await fleet.start("d")).done()

    run()


@on_loop
async def test_a_full_queue_refuses_who_comes_last() -> None:
    fleet = Fleet()
    await fleet.start("a")
    for _ in range(3):
        await fleet.start("a")
    assert refusal(await fleet.start("a")) == (429, "queue_full", 1.0)
    assert fleet.flow.waiting == 3


@on_loop
async def test_a_full_queue_makes_room_for_other_flows() -> None:
    """One that fills it does not lock the others out, and does not lose more than its excess."""
    fleet = Fleet()
    await fleet.start("a")
    waiting = [await fleet.start("a") for _ in range(3)]
    first, second = await fleet.start("b"), await fleet.start("b")
    assert refusal(waiting[2])[:2] == (429, "queue_full")
    assert not waiting[1].done()
    assert not first.done()
    assert refusal(second)[:2] == (429, "queue_full")


@on_loop
async def test_a_full_queue_makes_room_for_higher_priorities() -> None:
    fleet = Fleet()
    await fleet.start("a")
    waiting = [await fleet.start("b", priority=priority) for priority in (1, 0, 1)]
    assert not (await fleet.start("b", priority=2)).done()
    assert refusal(waiting[1])[:2] == (429, "queue_full")
    assert refusal(await fleet.start("b", priority=0))[:2] == (429, "queue_full")


@on_loop
async def test_bytes_are_bounded() -> None:
    fleet = Fleet()
    await fleet.start("a")
    large = await fleet.start("a", size=600)
    assert refusal(await fleet.start("a", size=600))[1] == "queue_full"
    assert refusal(await fleet.start("b", size=1001))[1] == "queue_full"
    assert not large.done()


@on_loop
async def test_nobody_makes_room_for_a_request_that_has_too_little_room_even_so() -> None:
    fleet = Fleet()
    await fleet.start("a")
    waiting = [await fleet.start("a", size=size) for size in (300, 200, 100)]
    assert refusal(await fleet.start("b", size=800))[1] == "queue_full"
    assert not any(each.done() for each in waiting)
    assert (fleet.flow.waiting, fleet.flow.waiting_bytes) == (3, 600)
    late = await fleet.start("b", size=600)  # two of them are enough
    assert [each.done() for each in waiting] == [False, True, True]
    await fleet.end_one()
    assert waiting[0].done()
    assert not late.done()


@on_loop
async def test_negative_priorities_do_not_wait() -> None:
    fleet = Fleet()
    await fleet.start("a")
    assert refusal(await fleet.start("b", priority=-1))[:2] == (429, "saturated")


@on_loop
async def test_retry_after_is_when_it_would_have_been_sent() -> None:
    """Two requests leave the queue each second, and six wait."""
    fleet = Fleet()
    fleet.flow._limits = FlowLimits(most_requests=6)
    await fleet.start("a")
    for _ in range(6):
        await fleet.start("a", tokens=1.0)
    for _ in range(40):
        fleet.now += 0.5
        await fleet.end_one()
        await fleet.start("a", tokens=1.0)
    status, code, retry_s = refusal(await fleet.start("a"))
    assert (status, code) == (429, "queue_full")
    assert retry_s == pytest.approx(3.5, rel=0.15)
    await fleet.start("b", priority=2)  # evicts one of a
    assert refusal(await fleet.start("b", priority=-1))[2] == pytest.approx(3.5, rel=0.15)


@on_loop
async def test_a_rate_of_long_ago_says_nothing() -> None:
    fleet = Fleet()
    await fleet.start("a")
    await fleet.start("a")
    await fleet.end_one()
    fleet.now += 3600.0
    assert refusal(await fleet.start("b", priority=-1)) == (429, "saturated", 1.0)
    for _ in range(3):
        await fleet.start("a")
    assert refusal(await fleet.start("a")) == (429, "queue_full", 1.0)


@on_loop
async def test_the_end_of_the_gateway_refuses_those_that_wait() -> None:
    fleet = Fleet()
    await fleet.start("a")
    waiting = await fleet.start("b")
    assert fleet.flow.stop() == 1
    await settled()
    assert refusal(waiting)[:2] == (503, "draining")


@on_loop
async def test_unused_gates_are_forgotten() -> None:
    fleet = Fleet(2)
    for number in range(2 * flow_control.MAX_GATES):
        request = FlowRequest("a")
        await fleet.flow.enter(request, number, fleet.places["all"].have_free)
        fleet.flow.ended(request, None)
    assert len(fleet.flow._gates) <= flow_control.MAX_GATES


def test_a_drain_rate_is_an_average() -> None:
    rate = DepartureRate()
    assert rate.per_second(0.0) == 0.0
    for number in range(40):
        rate.count_departure(number / 4)
    assert rate.per_second(10.0) == pytest.approx(4.0, rel=0.1)
    assert rate.per_second(10.0 + 5 * WINDOW_S) < 0.1
