"""Which endpoints a request may be sent to, by their health."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from penstock.gateway.routing.endpoint import STALE_S, Endpoint
from penstock.gateway.routing.endpoint_columns import EndpointColumns, Flags, Floats, Rows

PANIC_SHARE = 0.5
"""Share of working endpoints below which all are used, as in Envoy."""


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """When an endpoint is saturated, and when affinity is ignored."""

    waiting: int = 5
    """An endpoint with at least this many waiting requests is saturated."""
    kv_used: float = 0.95
    """An endpoint with at least this share of its KV cache in use is saturated."""
    affinity_excess: float = 1.5
    """Affinity is ignored for an endpoint with more requests than this multiple of those at the least
    loaded one, plus some."""
    hash_excess: float = 1.25
    """An endpoint with more requests than this multiple of the mean, plus some, gets nothing by hash. Source:
    Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018."""


class UsableEndpoints:
    """The filters of a picker. Rows are those of ``columns``."""

    def __init__(self, columns: EndpointColumns, limits: PickerLimits) -> None:
        self._columns = columns
        self._limits = limits

    def usable(self, rows: Rows, tried: Set[Endpoint], now: float) -> Rows:
        """Endpoints that a request may be sent to: those that work, and those that get a probe.

        If fewer than PANIC_SHARE of all work, all that can be connected to, unless working ones are known to
        have room: a few would not bear the load of all, and what fails so many may be none of their faults. A
        request that has failed already goes to a working one.
        """
        columns = self._columns
        if not tried and not columns.troubled:
            return rows
        present = ~columns.away[rows]
        untried = present.copy()
        for endpoint in tried:
            untried &= rows != columns.find_row(endpoint)
        working = present & (columns.open_until[rows] == -np.inf)
        left = working & untried
        if (
            np.count_nonzero(working) >= PANIC_SHARE * len(rows)
            or (tried and left.any())
            or self._have_room(rows[left], now).any()
        ):
            untried &= self._allowed(rows, now)
        chosen = rows[untried]
        unreadable = columns.unreadable[chosen]
        # What ails the scrapes of most need not ail requests, and a few would not bear the load of all.
        return chosen[~unreadable] if 2 * np.count_nonzero(unreadable) <= len(chosen) else chosen

    def _allowed(self, rows: Rows, now: float) -> Flags:
        """Rows whose circuit breaker allows a request."""
        open_until = self._columns.open_until[rows]
        allowed: Flags = open_until == -np.inf
        for index in np.flatnonzero(~allowed & (open_until <= now)):  # half open
            endpoint = self._columns.endpoints[rows[index]]
            allowed[index] = endpoint is not None and endpoint.breaker.allows(now)
        return allowed

    def _have_room(self, rows: Rows, now: float) -> Flags:
        """Rows of which it is known that their queue is short and their KV cache not full."""
        columns = self._columns
        room: Flags = now - columns.scraped_at[rows] <= STALE_S
        room &= columns.waiting[rows] < self._limits.waiting
        room &= columns.kv_used[rows] < self._limits.kv_used
        return room

    def are_saturated(self, rows: Rows, now: float) -> bool:
        """Whether all are, as far as is known."""
        columns, limits = self._columns, self._limits
        busy = columns.waiting[rows] + columns.sent[rows] >= limits.waiting
        busy |= columns.kv_used[rows] >= limits.kv_used
        return bool((busy & (now - columns.scraped_at[rows] <= STALE_S)).all())

    def backoff_until(self, rows: Rows, client: str, model: str) -> Floats:
        """Until when each wants no requests of this client for this model."""
        columns = self._columns
        until = columns.backoff_until[rows]
        if columns.tells_clients_apart:
            for row in columns.tells_clients_apart:
                endpoint = columns.endpoints[row]
                if endpoint is not None:
                    until[rows == row] = endpoint.backoff.until_for(client, model)
        return until
