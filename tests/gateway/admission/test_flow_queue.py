"""The order of waiting requests: priorities, fair shares."""

from __future__ import annotations

import asyncio

from penstock.gateway.admission.fair_shares import FairShares
from penstock.gateway.admission.flow_queue import FlowQueue, Waiter


class Served:
    """A queue whose waiters are sent one after the other, each when the one before has ended."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self.queue = FlowQueue(self.shares)
        self.loop = asyncio.new_event_loop()

    def add(
        self, flow: str, count: int = 1, *, priority: int = 0, tokens: float = 10.0, weight: float = 1.0
    ) -> None:
        for _ in range(count):
            self.queue.add(
                Waiter(
                    flow=flow,
                    weight=weight,
                    priority=priority,
                    tokens=tokens,
                    size=0,
                    arrived_at=0.0,
                    deadline=1.0,
                    granted=self.loop.create_future(),
                )
            )

    def send(self, count: int, **tokens: float) -> str:
        """The flows of the next requests; ``tokens`` of those that have others than estimated."""
        flows = []
        for _ in range(count):
            waiter = self.begin()
            used = tokens.get(waiter.flow, waiter.tokens)
            self.shares.end(waiter.flow, waiter.expected, used, waiter.weight, waiter.tokens)
            flows.append(waiter.flow)
        return "".join(flows)

    def begin(self) -> Waiter:
        """The next request is sent."""
        waiter = self.queue.next()
        waiter.expected = self.shares.begin(waiter.flow, waiter.tokens, waiter.weight)
        self.queue.remove(waiter)
        return waiter


def served() -> Served:
    queue = Served()
    queue.loop.close()
    return queue


def test_one_flow_is_first_come_first_served() -> None:
    queue = served()
    queue.add("a", 3)
    first = next(iter(queue.queue))
    assert queue.queue.next() is first
    assert queue.send(3) == "aaa"
    assert not queue.queue


def test_flows_take_turns_whoever_came_first() -> None:
    queue = served()
    queue.add("a", 6)
    queue.add("b", 3)
    assert queue.send(6) == "ababab"


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = served()
    queue.add("a", 9, tokens=40.0)
    queue.add("b", 9, tokens=10.0)
    sent = queue.send(10)
    assert (sent.count("a"), sent.count("b")) == (2, 8)


def test_weights() -> None:
    queue = served()
    queue.add("a", 30, weight=3.0)
    queue.add("b", 30, weight=1.0)
    sent = queue.send(16)
    assert (sent.count("a"), sent.count("b")) == (12, 4)


def test_what_a_reply_really_had_counts() -> None:
    """Flow a has estimates of 10 tokens, and gets 110."""
    queue = served()
    queue.add("a", 9)
    queue.add("b", 9)
    assert queue.send(2, a=110.0) == "ab"
    assert queue.send(9) == "bbbbbbbba"  # b has no more


def test_estimates_that_are_too_high_take_no_share_from_who_waits() -> None:
    """Two at a time, of 2 tokens instead of 256: the flow of weight 3 has its share from the first."""
    queue = served()
    running = []
    queue.add("a", 60, tokens=256.0)
    running += [queue.begin(), queue.begin()]
    queue.add("b", 60, tokens=256.0, weight=3.0)
    sent = []
    for _ in range(60):
        ended = running.pop(0)
        queue.shares.end(ended.flow, ended.expected, 2.0, ended.weight, ended.tokens)
        running.append(queue.begin())
        sent.append(running[-1].flow)
    assert 42 <= sent.count("b") <= 48
    assert 6 <= sent[:10].count("b") <= 9


def test_who_comes_later_waits_for_no_estimates() -> None:
    """Nor do estimates of those that run keep others from their turns."""
    queue = served()
    queue.add("a", 100, tokens=256.0)
    for _ in range(20):
        queue.begin()
    queue.add("b", 100, tokens=2.0)
    assert "b" in queue.send(2, a=2.0)


def test_an_idle_flow_saves_nothing_up() -> None:
    queue = served()
    queue.add("a", 100)
    queue.send(50)
    queue.add("b", 10)
    assert queue.send(6).count("b") == 3


def test_use_without_competition_is_not_held_against_a_flow() -> None:
    queue = served()
    queue.add("a", 50)
    queue.send(50)
    queue.add("a", 5)
    queue.add("b", 5)
    assert queue.send(6).count("a") == 3


def test_higher_priorities_go_first() -> None:
    queue = served()
    queue.add("low", priority=0)
    queue.add("high", priority=5)
    assert queue.queue.bottom == 0
    assert queue.send(2) == "highlow"


def test_waiting_before_a_priority() -> None:
    queue = served()
    queue.add("a", 3, priority=1)
    queue.add("b", 2)
    assert [queue.queue.waiting_before(priority) for priority in (2, 1, 0)] == [0, 3, 5]


def test_the_longest_flow_and_late_waiters() -> None:
    queue = served()
    queue.add("a", 3)
    queue.add("b", 1)
    count, newest = queue.queue.longest_flow(0)
    assert (count, newest.flow) == (3, "a")
    assert newest is list(queue.queue)[2]
    assert queue.queue.waiting_of(0, "b") == 1
    assert queue.queue.waiting_of(1, "b") == 0
    assert queue.queue.late(0.5) == []
    assert len(queue.queue.late(1.0)) == 4


def test_flows_that_are_remembered_are_bounded() -> None:
    """Not of those that wait."""
    shares = FairShares(most_flows=2)
    shares.wait("a")
    for flow in "bcd":
        shares.begin(flow, 10.0, 1.0)
        shares.end(flow, 10.0, 30.0, 1.0)
    assert list(shares._flows) == ["a", "d"]
    shares.end("b", 10.0, 30.0, 1.0)
    assert shares.start_of("a") == 0.0
    shares.wait("b")
    assert shares.start_of("b") == 0.0
    assert list(shares._flows) == ["a", "b"]
