"""How much requests of many inputs delay the replies to other requests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from penstock.bench.deadline import Deadline
from penstock.bench.embed.whole_replies import WholeReplies

RATE = 200.0
"""Requests per second: so few that they do not wait for each other."""


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in milliseconds, medians over the rounds."""

    inputs: int
    beside: int
    """Requests of so many inputs that were answered meanwhile, one after the other."""
    p99_alone_ms: float
    p99_beside_ms: float
    p99_delay_ms: float
    """Median of the differences within a round."""

    def __str__(self) -> str:
        return (
            f"{RATE:.0f} requests/s, p99: {self.p99_alone_ms:.1f} ms alone, {self.p99_beside_ms:.1f} ms "
            f"beside {self.beside} requests of {self.inputs:,} inputs: {self.p99_delay_ms:+.1f} ms"
        )


def measure_delay(
    client: WholeReplies,
    requests: Sequence[bytes],
    large: bytes,
    inputs: int,
    count: int,
    rounds: int,
    deadline: Deadline,
) -> Delay:
    """Send ``count`` of ``requests`` at RATE, alone and beside ``large``, which has so many ``inputs``, by
    turns. Raises BenchError."""
    alone: list[float] = []
    beside: list[float] = []
    answered = 0
    client.run(requests, min(count, round(RATE)), deadline.left("a round"), rate=RATE, beside=large)
    for _ in range(rounds):
        without = client.run(requests, count, deadline.left("a round"), rate=RATE)
        with_ = client.run(requests, count, deadline.left("a round"), rate=RATE, beside=large)
        alone.append(without.latency_ms.p99 or 0.0)
        beside.append(with_.latency_ms.p99 or 0.0)
        answered += with_.beside
    return Delay(
        inputs=inputs,
        beside=answered,
        p99_alone_ms=statistics.median(alone),
        p99_beside_ms=statistics.median(beside),
        p99_delay_ms=statistics.median(b - a for a, b in zip(alone, beside, strict=True)),
    )
