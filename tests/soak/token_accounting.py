"""The server's own counts against those of its clients."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from penstock.metrics import families as f
from tests.soak.request_verification import ClientCounts, RequestEnd


class ServerCounts(msgspec.Struct, frozen=True):
    """Sums over the server's processes, from ``/metrics``."""

    # -- gauges
    streams: float
    running: float
    waiting: float
    connections: float
    bytes_queued: float
    engines_up: float
    # -- counters
    generated: float
    """Tokens counted by engines."""
    delivered: float
    """Tokens for requests, counted by API servers."""
    discarded: float
    """Tokens for ended requests, counted by API servers."""
    completed: float
    """Requests with finish reason stop or length, counted by API servers."""
    aborted: float
    cut: float
    failed: float
    resumed: float

    @property
    def idle(self) -> bool:
        return not (self.streams or self.running or self.waiting or self.bytes_queued)

    @property
    def counters(self) -> tuple[float, ...]:
        return (
            self.generated,
            self.delivered,
            self.discarded,
            self.completed,
            self.aborted,
            self.cut,
            self.failed,
        )

    @property
    def arrived(self) -> float:
        """Tokens that API servers received."""
        return self.delivered + self.discarded

    @classmethod
    def from_exposition(cls, text: str) -> ServerCounts:
        """From the text of ``/metrics``."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                outcome = sample.labels.get("outcome", "")
                for name in (sample.name, f"{sample.name} {outcome}"):
                    sums[name] = sums.get(name, 0.0) + sample.value

        def of(family: f.MetricFamily, *outcomes: str) -> float:
            name = family.name + ("_total" if family.kind is f.MetricKind.COUNTER else "")
            names = [f"{name} {outcome}" for outcome in outcomes] or [name]
            return sum(sums.get(each, 0.0) for each in names)

        return cls(
            streams=of(f.STREAMS),
            running=of(f.RUNNING),
            waiting=of(f.WAITING),
            connections=of(f.CONNECTIONS),
            bytes_queued=of(f.BYTES_QUEUED),
            engines_up=of(f.UP),
            generated=of(f.GENERATION_TOKENS),
            delivered=of(f.DELIVERED),
            discarded=of(f.DISCARDED),
            completed=of(f.REQUESTS, "stop", "length"),
            aborted=of(f.REQUESTS, "abort"),
            cut=of(f.REQUESTS, "cut"),
            failed=of(f.REQUESTS, "error"),
            resumed=of(f.INTERRUPTED, "resumed"),
        )


async def read_server_counts(http: httpx.AsyncClient) -> ServerCounts:
    """The counts from any API server. Raises httpx.HTTPError."""
    reply = await http.get("/metrics", headers={"connection": "close"})
    return ServerCounts.from_exposition(reply.raise_for_status().text)


class TokenBalance(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a period between two times at which the server was idle.

    ``unaccounted``: tokens counted by engines minus tokens counted by API servers. It is 0 unless a process
    was killed, whose counts of the last second are lost; ``uncertain`` is the maximum that killed processes
    explain.
    """

    deaths: int
    generated: float
    delivered: float
    discarded: float
    unaccounted: float
    uncertain: float
    clients_complete: int
    clients_partial: int
    clients_partial_most: int


def reconcile(
    before: ServerCounts, after: ServerCounts, clients: ClientCounts, *, deaths: int, uncertain: float
) -> tuple[TokenBalance, list[str]]:
    """The token balance of a period, and errors in the counts.

    ``clients``: the clients' counts of the period. ``deaths``: number of killed processes, which explain at
    most ``uncertain`` tokens together.
    """
    generated = after.generated - before.generated
    arrived = after.arrived - before.arrived
    found = TokenBalance(
        deaths=deaths,
        generated=generated,
        delivered=after.delivered - before.delivered,
        discarded=after.discarded - before.discarded,
        unaccounted=generated - arrived,
        uncertain=uncertain,
        clients_complete=clients.complete_tokens,
        clients_partial=clients.partial_tokens,
        clients_partial_most=clients.partial_asked,
    )
    return found, list(_errors(found, before, after, clients))


def _errors(
    found: TokenBalance, before: ServerCounts, after: ServerCounts, clients: ClientCounts
) -> Iterator[str]:
    if abs(found.unaccounted) > found.uncertain:
        yield (
            f"engines generated {found.generated:,.0f} tokens, API servers got "
            f"{found.delivered + found.discarded:,.0f}; {found.deaths} deaths explain at most "
            f"{found.uncertain:,.0f}"
        )
    least = clients.complete_tokens + clients.partial_tokens - found.uncertain
    most = clients.complete_tokens + clients.partial_asked + found.uncertain
    if not least <= found.delivered <= most:
        yield (
            f"API servers delivered {found.delivered:,.0f} tokens, clients got {clients.complete_tokens:,} "
            f"in complete replies and {clients.partial_tokens:,} to {clients.partial_asked:,} in others"
        )
    if any(new < old for old, new in zip(before.counters, after.counters, strict=True)):
        yield f"counters went backwards: {before.counters} to {after.counters}"
    if found.deaths:
        return
    complete = clients.ended_with(RequestEnd.COMPLETE)
    others = clients.ended_with(RequestEnd.LEFT, RequestEnd.CUT, RequestEnd.HOSTILE) + clients.retried
    completed = after.completed - before.completed
    if not complete <= completed <= complete + others:
        yield f"API servers completed {completed:,.0f} requests, clients {complete:,}, and left {others:,}"
    ended = completed + after.aborted - before.aborted + after.cut - before.cut
    if ended > complete + others:
        yield f"API servers ended {ended:,.0f} requests, clients only {complete + others:,}"
    if after.cut - before.cut < clients.ended_with(RequestEnd.CUT):
        ended_cut, counted_cut = clients.ended_with(RequestEnd.CUT), after.cut - before.cut
        yield f"{ended_cut:,} connections were cut, API servers cut {counted_cut:,.0f}"
    if after.failed > before.failed:
        yield f"{after.failed - before.failed:,.0f} requests failed by the API servers' count"
