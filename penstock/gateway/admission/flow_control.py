"""Holds requests in the gateway while all endpoints that could serve them are full."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from penstock.gateway.admission.drain_rate import DepartureRate
from penstock.gateway.admission.fair_shares import FairShares
from penstock.gateway.admission.flow_queue import FlowQueue, Waiter
from penstock.gateway.admission.other_queues import NO_OTHERS, OtherQueues, key_for_all, rank_for_all
from penstock.gateway.requests.apis import gateway_error
from penstock.http.admission import retry_headers
from penstock.http.eager import TasklessFuture
from penstock.http.errors import ApiError
from penstock.http.request import ClientGone

CHECK_INTERVAL_S = 0.05
"""Interval, while requests wait, of checks for deadlines, and for places that no ended request has left."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 300.0
"""Bounds of Retry-After."""
HaveFree = Callable[[int, float], bool]
"""Whether endpoints have more free places than this number at this time."""
GUARD_INTERVAL = 20
"""Every request of this number that is sent is the one that has waited longest, whatever its priority: no
band starves, and the lower ones together get at least 5 %."""
MAX_YIELD_S = 0.1
"""Time for which a free place is left to the first request of another worker, which may hang, or know that
the place is of no use to it."""
MAX_GATES = 1024
"""Sets of endpoints whose drain rate is remembered; beyond them those without a waiter are forgotten."""


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Bounds of the requests that wait, of all together."""

    most_requests: int = 1024
    most_bytes: int = 256 << 20
    timeout_s: float = 30.0
    """Longest wait of a request."""
    share: float = 1.0
    """Of the gateway's requests those that come to this worker."""


@dataclass(slots=True, eq=False)
class FlowRequest:
    """What flow control has to know of a request."""

    flow: str
    """Who shares fairly: the name of a key, or the value of a header."""
    weight: float = 1.0
    priority: int = 0
    """Priority band of the request. Negative: it is refused instead of waiting."""
    tokens: float = 0.0
    """Estimated tokens, prompt and reply."""
    size: int = 0
    """Bytes that are held for it."""
    timeout_s: float = math.inf
    """The client's own limit for its wait."""
    deadline: float = math.inf
    """When the request has to have ended, reply included."""
    promised_by: Gate | None = None
    """The gate that has granted it a place, until an endpoint counts it."""
    expected: float = 0.0
    """Tokens with which its flow was charged."""
    queued_s: float = 0.0
    """How long it has waited."""


class FlowControl:
    """All requests that wait, by the endpoints that may serve them. ``clock`` gives seconds, the same in all
    workers; ``others`` are the queues of the other ones."""

    def __init__(
        self, limits: FlowLimits, clock: Callable[[], float], others: OtherQueues = NO_OTHERS
    ) -> None:
        self.waiting = 0
        self.waiting_bytes = 0
        self._limits = limits
        self._clock = clock
        self._others = others
        self.shares = FairShares()
        self._gates: dict[Hashable, Gate] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._fills_soon = False

    def queued(self, key: Hashable) -> float:
        """Requests that wait for the endpoints of this name, in all workers if the others have as many."""
        gate = self._gates.get(key)
        return 0.0 if gate is None else len(gate.queue) / self._limits.share

    def waiting_by_priority(self) -> dict[int, tuple[int, int]]:
        """Requests and their bytes; of priority 0 also when there are none."""
        found = {0: (0, 0)}
        for gate in self._gates.values():
            for waiter in gate.queue:
                count, size = found.get(waiter.priority, (0, 0))
                found[waiter.priority] = count + 1, size + waiter.size
        return found

    # -- the way of a request

    async def enter(
        self,
        request: FlowRequest,
        key: Hashable,
        have_free: HaveFree,
        gone: asyncio.Future[None] | None = None,
    ) -> None:
        """Wait for a place at the endpoints of ``have_free``; ``key`` is the same for the same endpoints, of
        which some may come and go. The latest request says where those that wait may go.
        ``gone`` is done when the client disconnects; None: the call is cancelled then. Raises ApiError with
        status 429 or 503, and ClientGone.

        After that :meth:`sent` is to be called, and :meth:`ended`.
        """
        gate, now = self._gate(key, have_free), self._clock()
        promised = gate.promised
        granted = self.fill_places() if self.waiting else 0
        if (
            not gate.queue
            and gate.has_place(now, granted - (gate.promised - promised))
            and gate.has_turn(rank_for_all(request.priority, now), now)
        ):
            self._grant(request, gate)
            return
        waiter = self._waiter(request, now)
        self._queue(waiter, gate, now)
        if gone is not None:
            gone.add_done_callback(waiter.leave)
        try:
            await waiter.granted
        except (asyncio.CancelledError, ClientGone):
            self._withdraw(waiter, gate)
            raise
        finally:
            request.queued_s = self._clock() - now
            if gone is not None:
                gone.remove_done_callback(waiter.leave)
        if gone is not None and gone.done():
            self._withdraw(waiter, gate)
            raise ClientGone
        request.promised_by, request.expected = gate, waiter.expected

    def sent(self, request: FlowRequest) -> None:
        """An endpoint counts the request from now on."""
        if request.promised_by is not None:
            request.promised_by.promise(-1)
            request.promised_by = None

    def ended(self, request: FlowRequest, tokens: float | None) -> None:
        """The request has ended, with so many tokens; None: unknown. It need not have been sent."""
        self.sent(request)
        used = request.expected if tokens is None else tokens
        estimated = 0.0 if tokens is None else request.tokens
        self.shares.end(request.flow, request.expected, used, request.weight, estimated)
        if (self.waiting or self._others.are_waiting) and not self._fills_soon:
            self._fills_soon = True
            asyncio.get_running_loop().call_soon(self._fill_after_ends)

    def stop(self) -> int:
        """Refuse every request that waits, as the gateway ends; returns how many there were."""
        waiting = self.waiting
        for gate in self._gates.values():
            for waiter in list(gate.queue):
                self._remove(waiter, gate)
                _refuse(waiter, gateway_error(503, "draining", "The gateway is shutting down."))
        return waiting

    # -- places

    def fill_places(self) -> int:
        """Grant the free places to those that wait; returns how many. Gates may have endpoints in common, so
        what one of them is granted counts for all; those whose endpoints are others get theirs the next
        time."""
        now, granted = self._clock(), 0
        before = {gate: gate.promised for gate in self._gates.values() if gate.queue}
        gates = list(before)
        while gates := [
            gate
            for gate in gates
            if gate.queue
            and gate.has_place(now, granted - (gate.promised - before[gate]))
            and gate.has_turn(gate.rank(), now)
        ]:
            waiter, gate = self._next(gates)
            if waiter.granted.done():  # its client has gone in this turn of the event loop
                self._remove(waiter, gate)
                continue
            if waiter.deadline <= now:
                self._refuse_late(waiter, gate, now)
                continue
            waiter.expected = self.shares.begin(waiter.flow, waiter.tokens, waiter.weight)
            self._remove(waiter, gate)
            gate.rate.count_departure(now)
            gate.promise(1)
            granted += 1
            waiter.granted.set_result(None)
        return granted

    def _fill_after_ends(self) -> None:
        """All requests that have ended in this turn of the event loop have left their places."""
        self._fills_soon = False
        self.fill_places()
        self._others.wake()

    def _next(self, gates: list[Gate]) -> tuple[Waiter, Gate]:
        """Whose turn it is at ``gates``, each of which has a place and waiters."""
        for gate in gates:
            gate.turns += 1
        if max(gate.turns for gate in gates) < GUARD_INTERVAL:
            heads = ((gate.queue.next(), gate) for gate in gates)
            return min(heads, key=lambda head: head[1].queue.rank(head[0]))
        for gate in gates:
            gate.turns = 0
        oldest = ((gate.queue.oldest, gate) for gate in gates)
        return min(oldest, key=lambda head: head[0].arrived_at)

    def _grant(self, request: FlowRequest, gate: Gate) -> None:
        gate.promise(1)
        request.promised_by = gate
        request.expected = self.shares.begin(request.flow, request.tokens, request.weight)

    def _check(self) -> None:
        """Called regularly while requests wait."""
        self._timer = None
        self.fill_places()
        now = self._clock()
        for gate in self._gates.values():
            for waiter in gate.queue.late(now):
                self._refuse_late(waiter, gate, now)
        self._watch()

    def _refuse_late(self, waiter: Waiter, gate: Gate, now: float) -> None:
        text = f"All model servers were busy for {now - waiter.arrived_at:.1f} s."
        self._remove(waiter, gate)
        _refuse(waiter, _busy("queue_timeout", text, gate.retry_after(waiter.priority, now)))

    def _watch(self) -> None:
        if self._timer is None and self.waiting:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)

    # -- the queue

    def _gate(self, key: Hashable, have_free: HaveFree) -> Gate:
        gate = self._gates.get(key)
        if gate is None:
            if len(self._gates) >= MAX_GATES:
                self._gates = {key: each for key, each in self._gates.items() if each.queue or each.promised}
            gate = self._gates[key] = Gate(have_free, FlowQueue(self.shares), self._others, key_for_all(key))
        gate.have_free = have_free  # its endpoints are those of now
        return gate

    def _waiter(self, request: FlowRequest, now: float) -> Waiter:
        return Waiter(
            flow=request.flow,
            weight=request.weight,
            priority=request.priority,
            tokens=request.tokens,
            size=request.size,
            arrived_at=now,
            deadline=min(now + min(self._limits.timeout_s, request.timeout_s), request.deadline),
            granted=TasklessFuture(),
        )

    def _withdraw(self, waiter: Waiter, gate: Gate) -> None:
        """Remove a waiter whose client has gone."""
        if waiter in gate.queue:
            self._remove(waiter, gate)
        elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
            gate.promise(-1)
            self.shares.end(waiter.flow, waiter.expected, 0.0, waiter.weight)
            self.fill_places()

    def _queue(self, waiter: Waiter, gate: Gate, now: float) -> None:
        """Add a waiter. Others make room for it if their priority is lower, or if their flow has more of the
        queue. Raises ApiError."""
        if not gate.queue:
            gate.rate.resume(now)
        if waiter.priority < 0:
            text = "All model servers are busy, and the request has low priority."
            raise _busy("saturated", text, gate.retry_after(waiter.priority, now))
        displaced = self._make_room(waiter)
        if displaced is None:
            text = f"All model servers are busy, and {self.waiting} requests wait already."
            raise _busy("queue_full", text, gate.retry_after(waiter.priority, now))
        text = "All model servers are busy, and other requests go first."
        for loser, its_gate in displaced:
            _refuse(loser, _busy("queue_full", text, its_gate.retry_after(loser.priority, now)))
        gate.queue.add(waiter)
        gate.publish()
        self.waiting += 1
        self.waiting_bytes += waiter.size
        self._watch()

    def _make_room(self, waiter: Waiter) -> list[tuple[Waiter, Gate]] | None:
        """Remove those that have to go for a waiter, and return them; None: it would not have room even so,
        and they stay."""
        removed: list[tuple[Waiter, Gate]] = []
        while not self._has_room(waiter):
            victim = self._victim(waiter)
            if victim is None:
                for each, gate in reversed(removed):
                    gate.queue.restore(each)
                    self.waiting += 1
                    self.waiting_bytes += each.size
                return None
            self._remove(*victim)
            removed.append(victim)
        return removed

    def _has_room(self, waiter: Waiter) -> bool:
        return (
            self.waiting < self._limits.most_requests
            and self.waiting_bytes + waiter.size <= self._limits.most_bytes
        )

    def _victim(self, waiter: Waiter) -> tuple[Waiter, Gate] | None:
        """Whoever has to make room: the newest of the flow that has most of the lowest band."""
        gates = [gate for gate in self._gates.values() if gate.queue]
        if not gates or waiter.size > self._limits.most_bytes:
            return None
        bottom = min(gate.queue.bottom for gate in gates)
        if bottom > waiter.priority:
            return None
        (count, newest), gate = max(
            ((gate.queue.longest_flow(bottom), gate) for gate in gates if gate.queue.bottom == bottom),
            key=lambda each: each[0][0],
        )
        own = sum(each.queue.waiting_of(waiter.priority, waiter.flow) for each in gates)
        if bottom == waiter.priority and (newest.flow == waiter.flow or count <= own + 1):
            return None
        return newest, gate

    def _remove(self, waiter: Waiter, gate: Gate) -> None:
        gate.queue.remove(waiter)
        gate.publish()
        self.waiting -= 1
        self.waiting_bytes -= waiter.size


@dataclass(slots=True, eq=False)
class Gate:
    """The endpoints that may serve the same requests, and the requests that wait for them."""

    have_free: HaveFree
    queue: FlowQueue
    others: OtherQueues
    key: int
    """Key of the gate, the same in all workers."""
    promised: int = 0
    """Requests that were granted a place and that no endpoint counts yet."""
    turns: int = 0
    """Places that it might have got since the oldest of its waiters was considered for one."""
    rate: DepartureRate = field(default_factory=DepartureRate)
    _yields_to: int = 0
    """Rank of the first request of another worker, to which a place is left."""
    _yields_since: float = 0.0

    def has_place(self, now: float, others: int = 0) -> bool:
        """``others``: places that other gates were granted just now."""
        if not self.others.alone:
            others += self.others.promised(self.key)
        return self.have_free(self.promised + others, now)

    def has_turn(self, rank: int, now: float) -> bool:
        """Whether a place that is free is for a request of this rank, and not for another worker's."""
        first = 0 if self.others.alone else self.others.first(self.key)
        if not first or rank <= first:
            return True
        if first != self._yields_to:
            self._yields_to, self._yields_since = first, now
        return now - self._yields_since > MAX_YIELD_S

    def rank(self) -> int:
        """Rank of the first request that waits; 0: none does."""
        if not self.queue:
            return 0
        first = self.queue.next()
        return rank_for_all(first.priority, first.arrived_at)

    def promise(self, places: int) -> None:
        """So many more are granted, or fewer."""
        self.promised += places
        self.publish()

    def publish(self) -> None:
        """Tell the other workers, after each change; without any, that there is nothing for them to know."""
        if self.others.alone:
            self.others.publish(self.key, 0, 0)
        else:
            self.others.publish(self.key, self.promised, self.rank())

    def retry_after(self, priority: int, now: float) -> float:
        """Seconds until a request of this priority would leave the queue, at the rate at which it drains."""
        rate = self.rate.per_second(now)
        wait_s = (self.queue.waiting_before(priority) + 1) / rate if rate else 0.0
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)


def _refuse(waiter: Waiter, error: Exception) -> None:
    if not waiter.granted.done():
        waiter.granted.set_exception(error)
        waiter.granted.exception()  # retrieved here: its client may have gone


def _busy(reason: str, message: str, retry_after_s: float) -> ApiError:
    error = gateway_error(429, reason, message)
    error.headers = retry_headers(math.ceil(1000 * retry_after_s))
    return error
