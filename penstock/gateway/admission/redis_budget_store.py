"""Budgets in Redis, for several gateways.

Each client has a hash with the time at which each of its budgets is full again, in microseconds of the Redis
server's clock, and a sorted set of its running requests by the time at which they count as lost. Both expire
when they say nothing any more. One script reads and writes them, so that gateways do not interfere.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from penstock.gateway.admission.budget_store import BudgetStoreError, Charge, Reservation
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_lost = RateLimitedLog(log)

PREFIX = "penstock:budgets"
MOST_UNSETTLED = 10_000
"""Ended requests that wait to be stored; beyond them the oldest are dropped, and their estimates stand."""
SETTLE_RETRY_S = 1.0
MOST_CONNECTIONS = 64

SCRIPT = """
-- KEYS: the client's budgets, its running requests.
-- ARGV: reserve or settle, request, time for which it runs at most, requests at a time (0: any number);
--       then for each budget: name, charge, amount, period. Times are microseconds.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local reserves = ARGV[1] == 'reserve'
local most = tonumber(ARGV[4])
if reserves and most > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= most then
    return {2}
  end
end
local full_at, reply, worst, longest = {}, {0, 0, 0}, 0, 0
for i = 5, #ARGV, 4 do
  local row = (i - 1) / 4
  local charge, amount, period = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local at = math.max(tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or now), now)
  local missing = at - now + math.min(charge, amount) * period / amount - period
  if reserves and missing > longest then
    worst, longest = row, missing
  end
  reply[row + 3] = at - now
  full_at[row] = at + charge * period / amount
end
if worst > 0 then
  reply[1], reply[2], reply[3] = 1, worst, math.ceil(longest)
  return reply
end
for i = 5, #ARGV, 4 do
  local row = (i - 1) / 4
  redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f', full_at[row]))
  reply[row + 3] = full_at[row] - now
end
local last = now
for _, at in ipairs(redis.call('HVALS', KEYS[1])) do
  last = math.max(last, tonumber(at))
end
redis.call('PEXPIRE', KEYS[1], math.ceil((last - now) / 1000) + 1)
if not reserves then
  redis.call('ZREM', KEYS[2], ARGV[2])
elseif most > 0 then
  redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], math.ceil(ARGV[3] / 1000))
end
return reply
"""


class RedisBudgetStore:
    """Budgets in the Redis server of a ``redis://``, ``rediss://`` or ``unix://`` URL."""

    def __init__(self, url: str, *, timeout_s: float, longest_request_s: float) -> None:
        """Raises ImportError without the package redis, and ValueError for a bad URL. ``longest_request_s``:
        after that time a request that was not settled counts as ended; its gateway may have died."""
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self._errors: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
        self._timeout_s = timeout_s
        self._lease_us = int(1e6 * longest_request_s)
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MOST_CONNECTIONS,
            timeout=timeout_s,  # further requests wait for a connection
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._client: Any = redis.asyncio.Redis.from_pool(pool)
        self._script = self._client.register_script(SCRIPT)
        self._unsettled: deque[tuple[str, str, Sequence[Charge]]] = deque()
        self._settling: asyncio.Task[None] | None = None

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        try:
            kind, *numbers = await self._run("reserve", client, request, charges, most_concurrent or 0)
        except (BudgetStoreError, asyncio.CancelledError):
            if most_concurrent is not None:  # it may be granted: its charges stand, but it does not run
                self.settle(client, request, (), counted=True)
            raise
        if kind == 2:
            return Reservation(too_many=True)
        worst, wait_us, *debts_us = numbers
        debts = [debt / 1e6 for debt in debts_us]
        return Reservation(debts, worst - 1, wait_s=wait_us / 1e6) if kind == 1 else Reservation(debts)

    def settle(self, client: str, request: str, charges: Sequence[Charge], *, counted: bool) -> None:
        if len(self._unsettled) >= MOST_UNSETTLED:
            _log_lost("lost", "the budget store does not answer; the estimate of an ended request stands")
            self._unsettled.popleft()
        self._unsettled.append((client, request, charges))
        if self._settling is None or self._settling.done():
            self._settling = asyncio.ensure_future(self._settle())

    async def close(self) -> None:
        if self._settling is not None:
            await asyncio.wait((self._settling,), timeout=self._timeout_s)
            self._settling.cancel()
        await self._client.aclose()

    async def _settle(self) -> None:
        while self._unsettled:
            client, request, charges = oldest = self._unsettled.popleft()
            try:
                await self._run("settle", client, request, charges, 0)
            except BudgetStoreError:
                self._unsettled.appendleft(oldest)
                await asyncio.sleep(SETTLE_RETRY_S)

    async def _run(
        self, action: str, client: str, request: str, charges: Sequence[Charge], most_concurrent: int
    ) -> list[int]:
        """Run the script. Raises BudgetStoreError."""
        # In a task of its own, as the client's time-outs need one: requests begin without (http/eager.py).
        return await asyncio.ensure_future(self._call(action, client, request, charges, most_concurrent))

    async def _call(
        self, action: str, client: str, request: str, charges: Sequence[Charge], most_concurrent: int
    ) -> list[int]:
        arguments: list[str | int] = [action, request, self._lease_us, most_concurrent]
        for budget, amount in charges:
            arguments += [budget.name, amount, budget.amount, int(1e6 * budget.period_s)]
        keys = [f"{PREFIX}:{{{client}}}:{kind}" for kind in ("full", "running")]
        try:
            async with asyncio.timeout(self._timeout_s):
                reply: list[int] = await self._script(keys=keys, args=arguments)
        except self._errors as error:
            raise BudgetStoreError(str(error) or "time-out") from None
        return reply
