"""Budgets in Redis, for several gateways, see :mod:`redis_script`.

What requests ask, and what ended ones have used, goes over one connection, all that waits at a time. So a
burst of a thousand requests takes a dozen round trips, and its own work is not taken for a silent store.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from penstock.gateway.admission.budget_store import (
    MAX_DEBT,
    BudgetStoreError,
    Charge,
    Reservation,
    is_answered,
)
from penstock.gateway.admission.redis_script import SCRIPT
from penstock.http.tls_problem import tls_problem
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_lost = RateLimitedLog(log)

PREFIX = "penstock:budgets"
LEASES = f"{PREFIX}:worker:"
SHARES = "penstock:shares:"
MAX_UNSETTLED = 10_000
"""Ended requests that wait to be stored; beyond them the oldest are dropped, and their estimates stand."""
SETTLE_RETRY_S = 1.0
MAX_AT_ONCE = 128
"""Calls of a kind in one round trip."""
LEASE_S, RENEW_S = 30.0, 10.0
"""Time for which a worker counts as alive that does not say again that it is, and when it says so: a gateway
that has died holds its clients' places for no longer."""


def _share_key(flow: str) -> str:
    """Where the tokens of a flow are counted, of which the name is as long as a client likes."""
    return f"{SHARES}{blake2b(flow.encode(errors='replace'), digest_size=16).hexdigest()}"


class _Call(NamedTuple):
    """One run of the script."""

    action: str
    client: str
    request: str
    charges: Sequence[Charge] = ()
    most_concurrent: int = 0
    answer: asyncio.Future[list[int]] | None = None


class BudgetClient(NamedTuple):
    """Which process asks. Names of requests begin with it."""

    gateway: str
    """A name that no other gateway has, the same for all its workers."""
    worker: str
    """``NUMBER.EPOCH`` of the worker."""
    first_epochs: Callable[[], Mapping[int, int]]
    """First epoch that may live, by number of a worker; earlier ones have ended."""


class RedisBudgetStore:
    """Budgets in the Redis server of a ``redis://``, ``rediss://`` or ``unix://`` URL."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        longest_request_s: float,
        place: BudgetClient,
        lease_s: float = LEASE_S,
    ) -> None:
        """Raises ImportError without the package redis, and ValueError for a bad URL."""
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self._errors: tuple[type[Exception], ...] = (RedisError, OSError)
        self._timeout_s = timeout_s
        self._longest_request_s = longest_request_s
        self._place = place
        self._lease_s, self._renew_s = lease_s, lease_s * RENEW_S / LEASE_S
        self._client: Any = redis.asyncio.Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0)
        )
        self._script = self._client.register_script(SCRIPT)
        self._heard = False
        """Whether the server has ever answered."""
        self._asking: deque[_Call] = deque()
        self._unsettled: deque[_Call] = deque()
        self._running: set[str] = set()
        """Requests that have places."""
        self._renew_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        call = _Call("reserve", client, self._name(request), charges, most_concurrent or 0, answer)
        self._asking.append(call)
        self._wake()
        try:
            kind, *numbers = await answer
        except (BudgetStoreError, asyncio.CancelledError):
            if call in self._asking:
                self._asking.remove(call)
            elif most_concurrent is not None:  # it may be granted: its charges stand, but it does not run
                self.settle(client, request, (), counted=True)
            raise
        if kind == 2:
            return Reservation(too_many=True)
        worst, wait_us, *told = numbers
        debts = [debt if charge.month else debt / 1e6 for charge, debt in zip(charges, told, strict=True)]
        if kind == 1:
            return Reservation(debts, worst - 1, wait_s=wait_us / 1e6)
        if most_concurrent is not None:
            self._running.add(call.request)
            self._wake_later(self._renew_s)
        return Reservation(debts)

    def settle(self, client: str, request: str, charges: Sequence[Charge], *, counted: bool) -> None:
        if len(self._unsettled) >= MAX_UNSETTLED:
            _log_lost("lost", "the budget store does not answer; the estimate of an ended request stands")
            self._unsettled.popleft()
        name = self._name(request)
        self._running.discard(name)
        self._unsettled.append(_Call("settle", client, name, charges))
        self._wake()

    async def count_served(
        self, served: Mapping[str, float], asked: Iterable[str], forget_s: float
    ) -> Sequence[float]:
        """See :class:`~penstock.gateway.admission.shared_shares.ShareStore`. Flows are named by hashes."""
        sums = await self._answer(self._count_served(served, [*asked], int(1e3 * forget_s)))
        return [float(each or 0) for each in sums]

    async def _count_served(
        self, served: Mapping[str, float], asked: Sequence[str], forget_ms: int
    ) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipe:
            for flow, tokens in served.items():
                pipe.incrbyfloat(_share_key(flow), tokens)
                pipe.pexpire(_share_key(flow), forget_ms)
            for flow in asked:
                pipe.get(_share_key(flow))
            replies: list[Any] = await pipe.execute()
        return replies[2 * len(served) :]

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            await asyncio.wait((self._sending,), timeout=self._timeout_s)
            self._sending.cancel()
        await self._client.aclose()

    def _name(self, request: str) -> str:
        return f"{self._place.gateway}/{self._place.worker}/{request}"

    # -- round trips

    def _wake(self) -> None:
        """There is something to send."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())

    def _wake_later(self, wait_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._unsettled or self._running:
            self._wake()
            self._wake_later(self._renew_s)

    async def _send(self) -> None:
        while calls := self._next():
            try:
                replies = await self._run(calls)
            except BudgetStoreError as error:
                self._failed(calls, error)
                return
            for call, reply in zip(calls, replies, strict=True):
                if call.answer is None or call.answer.done():
                    continue
                if isinstance(reply, Exception):
                    call.answer.set_exception(BudgetStoreError(str(reply)))
                else:
                    call.answer.set_result(reply)

    def _next(self) -> list[_Call]:
        calls = [
            waiting.popleft()
            for waiting in (self._unsettled, self._asking)
            for _ in range(min(len(waiting), MAX_AT_ONCE))
        ]
        now = asyncio.get_running_loop().time()
        if self._running and now >= self._renew_at:
            self._renew_at = now + self._renew_s / 2
            calls.append(_Call("renew", "", ""))
        return calls

    def _failed(self, calls: list[_Call], error: BudgetStoreError) -> None:
        """Whoever asks is told, and those as well who would ask now. What has ended is stored later."""
        self._unsettled.extendleft(call for call in reversed(calls) if call.action == "settle")
        while len(self._unsettled) > MAX_UNSETTLED:
            self._unsettled.popleft()
        self._renew_at = -math.inf
        asked = [call.answer for call in (*calls, *self._asking) if call.answer is not None]
        self._asking.clear()
        for answer in asked:
            if not answer.done():
                answer.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_later(SETTLE_RETRY_S)

    async def _run(self, calls: Sequence[_Call]) -> list[Any]:
        """The script's reply to each call, or an exception. Raises BudgetStoreError."""
        return await self._answer(self._execute(calls))

    async def _answer(self, asking: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Raises BudgetStoreError."""
        running = asyncio.ensure_future(asking)
        try:
            if not await is_answered(running, self._timeout_s):
                raise BudgetStoreError("time-out")
            replies = running.result()
            self._heard = True
            return replies
        except self._errors as error:
            tls = tls_problem(error, plain="redis://", authority="?ssl_ca_certs=FILE names it")
            text = tls or str(error) or type(error).__name__
            if not self._heard and tls is None:
                text += "; it has never answered: a server that speaks TLS wants rediss://"
            raise BudgetStoreError(text) from None
        finally:
            running.cancel()

    async def _execute(self, calls: Sequence[_Call]) -> list[Any]:
        place, epochs = self._place, self._place.first_epochs()
        lease, longest = (int(1e6 * seconds) for seconds in (self._lease_s, self._longest_request_s))
        alive = " ".join(f"{number} {epoch}" for number, epoch in epochs.items())
        async with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                arguments: list[str | int] = [call.action, call.request, lease, longest, call.most_concurrent]
                arguments += [place.gateway, alive, LEASES, MAX_DEBT]
                keys = [f"{PREFIX}:{{{call.client}}}:running", f"{LEASES}{place.gateway}/{place.worker}"]
                for charge in call.charges:
                    budget = charge.budget
                    arguments += [budget.name, charge.amount, budget.amount, int(1e6 * budget.period_s)]
                    keys.append(f"{PREFIX}:{{{charge.owner(call.client)}}}:{charge.month or 'full'}")
                await self._script(keys=keys, args=arguments, client=pipe)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies
