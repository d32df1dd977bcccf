"""Budgets of clients, in this process and in Redis: one suite for both stores."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.budget_store import (
    BudgetStore,
    BudgetStoreError,
    Charge,
    MemoryBudgetStore,
    Reservation,
    is_answered,
)
from penstock.gateway.admission.budget_terms import PeriodTerms, SharedBudgets, TeamEntry
from penstock.gateway.admission.budgets import (
    OUTAGE_S,
    Budgets,
    Reserved,
    duration,
    month_left_s,
    month_of,
)
from penstock.gateway.admission.redis_budget_store import BudgetClient, RedisBudgetStore
from penstock.gateway.billing.prices import NANO
from penstock.gateway.requests.caller import Budget, Caller
from penstock.http.errors import ApiError
from tests.gateway.redis_server import redis_server

SLOW = 86_400.0
"""A period in which nothing refills while a test runs."""


def caller(name: str = "a", most_concurrent: int | None = None, **amounts: int) -> Caller:
    budgets = tuple(
        Budget(f"{unit.replace('_', '-')}-per-day", amount, SLOW) for unit, amount in amounts.items()
    )
    return Caller(name, name, budgets=budgets, most_concurrent=most_concurrent)


def redis_store(
    url: str, of: BudgetClient | None = None, *, timeout_s: float = 5.0, lease_s: float = 30.0
) -> RedisBudgetStore:
    return RedisBudgetStore(
        url, timeout_s=timeout_s, longest_request_s=60.0, place=of or place(), lease_s=lease_s
    )


def place(worker: str = "0.0", gateway: str = "g", **first_epochs: int) -> BudgetClient:
    epochs = {int(number.removeprefix("of_")): epoch for number, epoch in first_epochs.items()}
    return BudgetClient(gateway, worker, lambda: epochs)


async def reserve(budgets: Budgets, who: Caller, tokens: int = 0, output: int = 0) -> Reserved:
    return await budgets.reserve(who, input_tokens=tokens, output_tokens=output)


async def refused(budgets: Budgets, who: Caller, tokens: int = 0, output: int = 0) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        await reserve(budgets, who, tokens, output)
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    return refusal.value


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@contextlib.asynccontextmanager
async def opened(store: str, request: pytest.FixtureRequest) -> AsyncIterator[Budgets]:
    made: BudgetStore
    loop = asyncio.get_running_loop()
    if store == "memory":
        made = MemoryBudgetStore(loop.time)
    else:
        made = redis = redis_store(request.getfixturevalue("redis_url"))
        await redis._client.flushall()
    yield Budgets(made, loop.time)
    await made.close()


@pytest.mark.parametrize("store", ["memory", "redis"])
class TestStores:
    """Every test is one over both stores."""

    def test_requests(self, store: str, request: pytest.FixtureRequest) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(requests=2)
                for _ in range(2):
                    await reserve(budgets, who)
                error = await refused(budgets, who)
                assert error.message.startswith("Rate limit reached for the key 'a': 2 requests-per-day.")
                headers = dict(error.headers)
                assert 43_000 < int(headers[b"retry-after"]) <= 43_200  # half a day gives one request
                assert headers[b"x-ratelimit-limit-requests"] == b"2"
                assert headers[b"x-ratelimit-remaining-requests"] == b"0"
                assert headers[b"x-ratelimit-reset-requests"] in (b"24h0m0s", b"23h59m60s", b"23h59m59s")
                await reserve(budgets, caller("b", requests=2))

        asyncio.run(run())

    def test_tokens_are_settled(self, store: str, request: pytest.FixtureRequest) -> None:
        """The estimate was too high, then too low."""

        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(tokens=1000, output_tokens=900)
                reserved = await reserve(budgets, who, 300, 600)
                await refused(budgets, who, 100, 100)
                budgets.settle(reserved, requests=1, input_tokens=250, output_tokens=50)
                budgets.settle(reserved, requests=1, input_tokens=250, output_tokens=50)  # counts once
                second = await settled(budgets, who, 600, 50)
                assert second is not None
                budgets.settle(second, requests=1, input_tokens=600, output_tokens=2000)
                error = await eventually_refused(budgets, who)
                assert "1000 tokens-per-day. Try again in 24h" in error.message

        asyncio.run(run())

    def test_nothing_is_charged_unless_all_budgets_allow_it(
        self, store: str, request: pytest.FixtureRequest
    ) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(requests=2, tokens=100)
                await reserve(budgets, who, 60)
                for _ in range(3):
                    await refused(budgets, who, 60)
                await reserve(budgets, who, 40)

        asyncio.run(run())

    def test_a_request_larger_than_its_budget_needs_all_of_it(
        self, store: str, request: pytest.FixtureRequest
    ) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(tokens=100)
                await reserve(budgets, who, 150)
                error = await refused(budgets, who, 1)
                # in debt by 50, and 1 is asked for
                assert float(dict(error.headers)[b"retry-after"]) == pytest.approx(0.51 * SLOW, rel=0.01)

        asyncio.run(run())

    def test_concurrent_requests(self, store: str, request: pytest.FixtureRequest) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(most_concurrent=2)
                first, _ = await reserve(budgets, who), await reserve(budgets, who)
                error = await refused(budgets, who)
                assert "2 concurrent-requests" in error.message
                assert dict(error.headers)[b"retry-after"] == b"1"
                budgets.settle(first, requests=1, input_tokens=0, output_tokens=0)
                assert await settled(budgets, who) is not None
                await refused(budgets, who)

        asyncio.run(run())

    def test_many_requests_at_a_time(self, store: str, request: pytest.FixtureRequest) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(requests=300)
                reserved = await asyncio.gather(*(reserve(budgets, who) for _ in range(300)))
                assert {each.store for each in reserved} == {budgets.store}
                await refused(budgets, who)

        asyncio.run(run())

    def test_requests_that_were_not_sent_cost_nothing(
        self, store: str, request: pytest.FixtureRequest
    ) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(requests=1, tokens=100)
                reserved = await reserve(budgets, who, 100)
                budgets.settle(reserved, requests=0, input_tokens=0, output_tokens=0)
                assert await settled(budgets, who, 100) is not None

        asyncio.run(run())

    def test_months(self, store: str, request: pytest.FixtureRequest) -> None:
        """What is admitted in a month is charged to that month, whenever it ends."""

        async def run() -> None:
            async with opened(store, request) as budgets:
                now = at("2026-12-31T23:59:50")
                budgets.wall = lambda: now
                terms = (Budget.named("cost-per-month", 5 * NANO), Budget.named("requests-per-month", 4))
                who = Caller("a", "a", budgets=terms)
                late, early = await pay(budgets, who, 2 * NANO), await pay(budgets, who, 2 * NANO)
                assert late is not None
                assert early is not None
                error = await unpaid(budgets, who, 2 * NANO)
                assert error.message == (
                    "Rate limit reached for the key 'a': 5 cost-per-month. Try again in 10s."
                )
                headers = dict(error.headers)
                assert headers[b"retry-after"] == b"10"
                assert headers[b"x-ratelimit-limit-cost"] == b"5"
                assert headers[b"x-ratelimit-remaining-cost"] == b"1"
                assert headers[b"x-ratelimit-remaining-requests"] == b"2"
                assert headers[b"x-ratelimit-reset-cost"] == b"10s"
                budgets.settle(early, requests=1, input_tokens=0, output_tokens=0, cost=NANO)
                assert await pay(budgets, who, 2 * NANO) is not None
                now += 10
                assert await pay(budgets, who, 5 * NANO) is not None
                budgets.settle(late, requests=1, input_tokens=0, output_tokens=0, cost=0)
                budgets.settle(early, requests=0, input_tokens=0, output_tokens=0, cost=0)
                error = await unpaid(budgets, who, 1)
                assert "Try again in 744h0m0s" in error.message

        asyncio.run(run())

    def test_what_is_used_of_a_month_never_falls_below_nothing(
        self, store: str, request: pytest.FixtureRequest
    ) -> None:
        async def run() -> None:
            async with opened(store, request) as budgets:
                who = Caller("a", "a", budgets=(Budget.named("cost-per-month", 5 * NANO),))
                reserved = await pay(budgets, who, NANO)
                assert reserved is not None
                budgets.settle(reserved, requests=1, input_tokens=0, output_tokens=0, cost=-(10**12))
                assert await pay(budgets, who, 5 * NANO) is not None
                await unpaid(budgets, who, 1)

        asyncio.run(run())

    def test_budgets_of_teams_and_models_are_shared(self, store: str, request: pytest.FixtureRequest) -> None:
        """A request is charged to all that hold for it, or to none."""

        async def run() -> None:
            async with opened(store, request) as budgets:
                shared = SharedBudgets.read(
                    [
                        TeamEntry(
                            "t", PeriodTerms(tokens_per_day=100), {"l*": PeriodTerms(tokens_per_month=50)}
                        )
                    ],
                    {"large": PeriodTerms(requests_per_day=2)},
                )
                first, second = (
                    shared.added_to(
                        Caller(name, name, team="t", budgets=(Budget.named("tokens-per-day", 90),))
                    )
                    for name in "ab"
                )
                other = shared.added_to(Caller("c", "c"))

                async def ask(who: Caller, tokens: int, *models: str) -> str:
                    try:
                        await budgets.reserve(who, input_tokens=tokens, output_tokens=0, models=models)
                    except ApiError as error:
                        return error.message.split(". Try")[0].removeprefix("Rate limit reached for ")
                    return ""

                assert await ask(first, 40, "small") == ""
                assert await ask(second, 70, "small") == "the team 't': 100 tokens-per-day"
                assert await ask(second, 51, "large") == ""  # a request needs all of it at most
                assert (
                    await ask(first, 1, "small", "large")
                    == "the team 't' and the model 'l*': 50 tokens-per-month"
                )
                assert await ask(second, 9, "small") == ""
                assert await ask(first, 1, "small") == "the team 't': 100 tokens-per-day"
                assert await ask(other, 1000, "large") == ""
                assert await ask(other, 1000, "large") == "the model 'large': 2 requests-per-day"
                assert await ask(other, 1000, "small") == ""

        asyncio.run(run())

    def test_a_wrong_count_of_tokens_costs_a_period(self, store: str, request: pytest.FixtureRequest) -> None:
        """A counter that wrapped: the client waits for no more than two periods, as if its clock had been set
        back."""

        async def run() -> None:
            async with opened(store, request) as budgets:
                who = caller(tokens=10_000)
                first = await reserve(budgets, who, 10)
                for _ in range(2):
                    budgets.settle(first, requests=1, input_tokens=10, output_tokens=10**12)
                    first.settled = False
                error = await eventually_refused(budgets, who)
                assert "Try again in 24h" in error.message
                assert 0.99 * SLOW < float(dict(error.headers)[b"retry-after"]) <= SLOW + 10
                budgets.settle(first, requests=0, input_tokens=0, output_tokens=-(10**12))
                assert await settled(budgets, who, 10_000) is not None
                await refused(budgets, who, 1)

        asyncio.run(run())


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


async def pay(budgets: Budgets, who: Caller, cost: int) -> Reserved | None:
    """What is reserved as soon as what was settled is stored."""
    for _ in range(1000):
        try:
            return await budgets.reserve(who, input_tokens=0, output_tokens=0, cost=cost)
        except ApiError:
            await asyncio.sleep(0.001)
    return None


async def unpaid(budgets: Budgets, who: Caller, cost: int) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        await budgets.reserve(who, input_tokens=0, output_tokens=0, cost=cost)
    return refusal.value


async def settled(budgets: Budgets, who: Caller, tokens: int = 0, output: int = 0) -> Reserved | None:
    """What is reserved as soon as what was settled is stored."""
    for _ in range(1000):
        try:
            return await reserve(budgets, who, tokens, output)
        except ApiError:
            await asyncio.sleep(0.001)
    return None


async def eventually_refused(budgets: Budgets, who: Caller) -> ApiError:
    for _ in range(1000):
        try:
            await reserve(budgets, who)
        except ApiError as error:
            return error
        await asyncio.sleep(0.001)
    raise AssertionError("it is not refused")


@given(st.integers(0, 4_000_000_000))
def test_a_month_ends_when_the_next_one_begins(now: int) -> None:
    left = month_left_s(now)
    assert 0 < left <= 31 * SLOW
    assert month_of(now + left - 1) == month_of(now) < month_of(now + left)


@pytest.mark.parametrize(
    ("now", "month", "left_s"),
    [
        ("2026-11-30T23:59:59", "2026-11", 1),
        ("2026-12-01T00:00:00", "2026-12", 31 * SLOW),
        ("2028-02-29T12:00:00", "2028-02", SLOW / 2),
        ("2027-02-28T00:00:00", "2027-02", SLOW),
    ],
)
def test_months_of_the_calendar(now: str, month: str, left_s: float) -> None:
    assert (month_of(at(now)), month_left_s(at(now))) == (month, left_s)


def test_what_is_known_of_months_is_bounded() -> None:
    async def run() -> None:
        store, now = MemoryBudgetStore(lambda: 0.0), 0.0
        budgets = Budgets(store, lambda: 0.0, wall=lambda: now)
        who = Caller("a", "a", budgets=(Budget.named("requests-per-month", 1),))
        for _ in range(5):
            await reserve(budgets, who)
            now += month_left_s(now)
        assert store.saved(0.0).used == [("a", "requests-per-month", f"1970-0{month}", 1) for month in (4, 5)]

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 10**15)), max_size=30))
def test_sums_of_money_do_not_drift(requests: list[tuple[int, int]]) -> None:
    """Whatever was estimated, what was used counts."""

    async def run() -> None:
        store = MemoryBudgetStore(lambda: 0.0)
        budgets = Budgets(store, lambda: 0.0, wall=lambda: 0.0)
        who = Caller("a", "a", budgets=(Budget.named("cost-per-month", 1 << 62),))
        for estimate, used in requests:
            reserved = await budgets.reserve(who, input_tokens=0, output_tokens=0, cost=estimate)
            budgets.settle(reserved, requests=1, input_tokens=0, output_tokens=0, cost=used)
        assert sum(used for *_, used in store.saved(0.0).used) == sum(used for _, used in requests)

    asyncio.run(run())


def test_budgets_refill() -> None:
    async def run() -> None:
        now = 50.0
        budgets = Budgets(MemoryBudgetStore(lambda: now), lambda: now)
        who = Caller("a", "a", budgets=(Budget("tokens-per-minute", 600, 60.0),))
        reserved = await reserve(budgets, who, 600)
        assert reserved.debts == [60.0]
        assert dict((await refused(budgets, who, 50)).headers)[b"retry-after"] == b"5"
        now += 5.0
        await reserve(budgets, who, 50)
        now += 600.0
        assert (await reserve(budgets, who, 60)).debts == [6.0]

    asyncio.run(run())


def test_places_of_a_gateway_that_died_are_freed_with_its_lease(redis_url: str) -> None:
    """Those of one that lives stay as long as they run."""

    async def run() -> None:
        lost, lives = (redis_store(redis_url, place(gateway=name), lease_s=0.3) for name in ("lost", "lives"))
        await lost._client.flushall()
        who, clock = caller(most_concurrent=2), asyncio.get_running_loop().time
        await reserve(Budgets(lost, clock), who)
        lost._running.clear()  # it renews nothing any more
        budgets = Budgets(lives, clock)
        await reserve(budgets, who)
        await refused(budgets, who)
        assert await settled(budgets, who) is not None
        await refused(budgets, who)
        assert await lives._client.pttl("penstock:budgets:worker:lives/0.0") > 0
        for store in (lost, lives):
            await store.close()

    asyncio.run(run())


def test_places_of_a_worker_that_died_are_freed_by_the_others(redis_url: str) -> None:
    async def run() -> None:
        stores = [
            redis_store(redis_url, each)
            for each in (place("0.0"), place("0.1"), place("0.1", of_0=1), place("0.1", "other", of_0=1))
        ]
        await stores[0]._client.flushall()
        who, clock = caller(most_concurrent=2), asyncio.get_running_loop().time
        for store in stores[:2]:
            await reserve(Budgets(store, clock), who)
        await refused(Budgets(stores[1], clock), who)
        await refused(Budgets(stores[3], clock), who)  # worker 0.0 of another gateway
        successor = Budgets(stores[2], clock)
        await reserve(successor, who)
        await refused(successor, who)  # 0.1 runs on
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_of_the_requests_that_wait_to_be_stored_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not one that is being stored; and nobody who asks waits for them."""
    from penstock.gateway.admission import redis_budget_store

    async def run() -> None:
        store = redis_store("redis://127.0.0.1:1")
        begun, answer = asyncio.Queue[list[str]](), asyncio.Event()

        async def execute(calls: list[tuple[str, str]]) -> list[list[int]]:
            begun.put_nowait([client for _, client, *_ in calls])
            await answer.wait()
            return [[0, 0, 0] for _ in calls]

        monkeypatch.setattr(store, "_execute", execute)
        monkeypatch.setattr(redis_budget_store, "MAX_UNSETTLED", 2)
        store.settle("a", "1", (), counted=True)
        assert await begun.get() == ["a"]
        for client in "bcd":
            store.settle(client, "1", (), counted=True)
        asking = asyncio.ensure_future(store.reserve("e", "1", (), None))
        await asyncio.sleep(0)
        answer.set()
        assert await asyncio.wait_for(begun.get(), 60) == ["c", "d", "e"]
        assert (await asking).granted
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("gone", [False, True])
def test_a_reservation_whose_answer_is_lost_does_not_count_as_running(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may have granted it when the client leaves, or the time is over."""

    async def run() -> None:
        store = redis_store("redis://127.0.0.1:1")
        batches, lost = asyncio.Queue[list[tuple[str, ...]]](), asyncio.Event()

        async def execute(calls: list[tuple[str, ...]]) -> list[list[int]]:
            batches.put_nowait([call[:3] for call in calls])
            if calls[0][0] == "reserve" and gone:
                await lost.wait()
            elif calls[0][0] == "reserve":
                raise ConnectionResetError
            return [[0, 0, 0] for _ in calls]

        monkeypatch.setattr(store, "_execute", execute)
        reserving = asyncio.ensure_future(store.reserve("a", "request", (), 1))
        assert await batches.get() == [("reserve", "a", "g/0.0/request")]
        if gone:
            reserving.cancel()
        with pytest.raises(asyncio.CancelledError if gone else BudgetStoreError):
            await reserving
        lost.set()
        assert await asyncio.wait_for(batches.get(), 60) == [("settle", "a", "g/0.0/request")]
        await store.close()

    asyncio.run(run())


class FakeStore(MemoryBudgetStore):
    """One that other gateways use as well, and that may be away."""

    away = False

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        if self.away:
            raise BudgetStoreError("it is away")
        return self.reserve_now(client, request, charges, most_concurrent)


def test_by_itself_a_process_goes_on_with_what_the_store_told_last() -> None:
    """Not with full budgets, however often the store comes and goes, nor with all places."""

    async def run() -> None:
        now = 0.0
        store = FakeStore(lambda: now)
        budgets, elsewhere = Budgets(store, lambda: now), Budgets(store, lambda: now)
        who = caller(requests=10, most_concurrent=8)
        for _ in range(4):
            budgets.settle(await reserve(elsewhere, who), requests=1, input_tokens=0, output_tokens=0)
        reserved = [await reserve(budgets, who) for _ in range(3)]
        store.away = True
        reserved += [await reserve(budgets, who) for _ in range(3)]
        assert "10 requests-per-day" in (await refused(budgets, who)).message
        for each in reserved:
            budgets.settle(each, requests=1, input_tokens=0, output_tokens=0)
        store.away, now = False, now + OUTAGE_S
        budgets.settle(await reserve(budgets, who), requests=1, input_tokens=0, output_tokens=0)
        store.away = True
        await refused(budgets, who)

    asyncio.run(run())


def test_by_itself_a_process_counts_the_requests_that_run() -> None:
    async def run() -> None:
        store = FakeStore(lambda: 0.0)
        budgets, who = Budgets(store, lambda: 0.0), caller(most_concurrent=2)
        first = await reserve(budgets, who)
        store.away = True
        await reserve(budgets, who)
        assert "2 concurrent-requests" in (await refused(budgets, who)).message
        budgets.settle(first, requests=1, input_tokens=0, output_tokens=0)
        await reserve(budgets, who)

    asyncio.run(run())


def test_a_late_event_loop_is_no_silent_store() -> None:
    """The answer has arrived while it was busy, or comes some turns later."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            time.sleep(0.02)  # longer than all the time for the answer
            if turns == 10:
                answer.set_result(None)
            else:
                loop.call_soon(turn)

        loop.call_soon(turn)
        assert await is_answered(answer, 0.01)
        assert not await is_answered(loop.create_future(), 0.01)

    asyncio.run(run())


def test_a_process_that_was_told_nothing_of_a_client_starts_with_its_share() -> None:
    """It cannot know what others have granted, such as before it was started."""

    async def granted(budgets: Budgets, who: Caller) -> int:
        for count in range(100):
            try:
                await reserve(budgets, who)
            except ApiError:
                return count
        raise AssertionError("it has no limit")

    async def run() -> None:
        now = 0.0
        store = FakeStore(lambda: now)
        store.away = True
        budgets = Budgets(store, lambda: now, share=0.5)
        assert await granted(budgets, caller("new", requests=20)) == 10
        now += SLOW / 4
        assert await granted(budgets, caller("new", requests=20)) == 5, "it refills as any other"
        store.away, now = False, now + OUTAGE_S
        await reserve(budgets, caller("known", requests=20))
        store.away = True
        assert await granted(budgets, caller("known", requests=20)) == 19

    asyncio.run(run())


@pytest.mark.parametrize("outage", ["local", "refuse"])
@pytest.mark.parametrize("silent", [False, True])
def test_a_store_that_does_not_answer(outage: str, silent: bool) -> None:
    """Not reachable, or silent: this process counts by itself, or refuses; and it asks once in a while."""

    async def run(port: int) -> None:
        loop = asyncio.get_running_loop()
        store = redis_store(f"redis://127.0.0.1:{port}", timeout_s=0.05)
        budgets = Budgets(store, loop.time, outage)  # type: ignore[arg-type]
        who = caller(requests=2)
        if outage == "local":
            first = await reserve(budgets, who)
            budgets.settle(first, requests=0, input_tokens=0, output_tokens=0)
            await reserve(budgets, who)
            began = loop.time()
            await reserve(budgets, who)
            await refused(budgets, who)
            assert loop.time() - began < OUTAGE_S / 2  # the store is not asked
        else:
            with pytest.raises(ApiError) as refusal:
                await reserve(budgets, who)
            assert (refusal.value.status, refusal.value.code) == (503, "budget_store")
        await store.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if silent:
            asyncio.run(run(port))
    if not silent:
        asyncio.run(run(port))


@pytest.mark.parametrize(
    ("scheme", "answer", "problem"),
    [
        ("rediss", b"-ERR unknown command\r\n", "TLS: the server does not speak it here"),
        ("redis", b"", "a server that speaks TLS wants rediss://"),
        ("redis", b"\x15\x03\x03\x00\x02\x02\x28", "a server that speaks TLS wants rediss://"),
    ],
)
def test_a_mistake_of_tls_is_told_as_one(scheme: str, answer: bytes, problem: str) -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        store = redis_store(f"{scheme}://127.0.0.1:{port}")
        with pytest.raises(BudgetStoreError) as caught:
            await store.reserve("a", "r", (), None)
        assert problem in str(caught.value)
        await store.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0121, "13ms"), (1.0, "1s"), (1.5, "1.5s"), (360.0, "6m0s"), (3605.0, "1h0m5s")],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
