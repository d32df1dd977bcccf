"""The state of endpoints in arrays, a row each, so that a pick does not visit them one by one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.rendezvous import Keys, stable_hash

Rows = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_NONE: frozenset[str] = frozenset()
FIRST_ROWS = 64
MAX_LISTS = 512
"""Lists of endpoints whose rows are remembered."""


class EndpointColumns:
    """Columns of all endpoints that were asked for. An endpoint tells when it changes, and its row is read
    again before the next look at the columns."""

    def __init__(self) -> None:
        self.waiting: Floats
        self.running: Floats
        self.kv_used: Floats
        self.sent: Floats
        """Sent since the load was scraped."""
        self.in_flight: Floats
        self.tokens: Floats
        self.ttft_s: Floats
        self.adapter_room: Floats
        """0.5: another adapter fits, 0: none does."""
        self.scraped_at: Floats
        """-inf: never."""
        self.open_until: Floats
        """Until when the circuit breaker is open; -inf: it is closed."""
        self.backoff_until: Floats
        """Until when it wants no requests, whoever sends them."""
        self.identity: Keys
        """Hashes of the URLs, the same in every gateway."""
        self.away: Flags
        self.unreadable: Flags
        self.troubled: set[int] = set()
        """Rows of endpoints whose circuit breaker is not closed, or that are away or unreadable."""
        self.has_refused: set[int] = set()
        """Rows of endpoints that have said when to come back, to some clients or to all."""
        self.tells_clients_apart: set[int] = set()
        """Rows of endpoints that have refused some clients and not all."""
        self.endpoints: list[Endpoint | None] = []
        """Endpoints by row; None: the row is free."""
        self._adapters: dict[str, set[int]] = {}
        """Rows by the name of a loaded adapter."""
        self._loaded: dict[int, frozenset[str]] = {}
        """Names of loaded adapters by row."""
        self._row: dict[Endpoint, int] = {}
        self._free: list[int] = []
        self._changed: set[int] = set()
        self._counted: set[int] = set()
        """Rows whose state has changed since it was read, and those of which only counts have."""
        self._lists: OrderedDict[int, tuple[Sequence[Endpoint], Rows]] = OrderedDict()
        """Rows of lists, by identity; a list that is here is not changed any more."""
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._grow(FIRST_ROWS)

    def rows(self, endpoints: Sequence[Endpoint]) -> Rows:
        """The rows of a list, which must not be changed later, without those that were removed; all changes
        are read before."""
        known = self._lists.get(id(endpoints))
        if known is not None:
            self._lists.move_to_end(id(endpoints))
            rows = known[1]
        else:
            rows = np.array([self.row(each) for each in endpoints if not each.removed], np.intp)
            self._lists[id(endpoints)] = endpoints, rows
            if len(self._lists) > MAX_LISTS:
                self._lists.popitem(last=False)
        if self._changed:
            for row in self._changed:
                self._read(row)
            self._changed.clear()
        if self._counted:
            for row in self._counted:
                self._read_counts(row)
            self._counted.clear()
        return rows

    def row(self, endpoint: Endpoint) -> int:
        """The row of an endpoint, which gets one if it has none."""
        row = self._row.get(endpoint)
        if row is None:
            if self._free:
                row = self._free.pop()
                self.endpoints[row] = endpoint
            else:
                row = len(self.endpoints)
                self.endpoints.append(endpoint)
                if row == len(self.waiting):
                    self._grow(2 * row)
            self._row[endpoint] = row
            self.identity[row] = stable_hash(endpoint.url.encode())
            endpoint.watch(self._changed, self._counted, row)
            self._changed.add(row)
        return row

    def find_row(self, endpoint: Endpoint) -> int:
        """The row of an endpoint; -1: it has none, as it was in no list or has left."""
        return self._row.get(endpoint, -1)

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left the pool."""
        row = self._row.pop(endpoint, None)
        if row is None:
            return
        endpoint.unwatch(self._changed)
        self._changed.discard(row)
        self._counted.discard(row)
        self._forget_adapters(row)
        for rows in (self.troubled, self.has_refused, self.tells_clients_apart):
            rows.discard(row)
        self.endpoints[row] = None
        self._free.append(row)
        self._lists.clear()

    def with_adapter(self, name: str) -> set[int]:
        """Rows of the endpoints that have the adapter loaded."""
        return self._adapters.get(name, set())

    @property
    def size(self) -> int:
        """Rows, free ones included."""
        return len(self.endpoints)

    def requests(self, rows: Rows) -> Floats:
        """Requests at each endpoint from all clients: its scraped counts, plus requests sent since."""
        scraped = self.waiting[rows] + self.running[rows] + self.sent[rows]
        return np.maximum(scraped, self.in_flight[rows])

    # -- reading

    def _read(self, row: int) -> None:
        endpoint = self.endpoints[row]
        assert endpoint is not None, "a free row does not change"
        load = endpoint.load
        self.waiting[row] = load.waiting
        self.running[row] = load.running
        self.kv_used[row] = load.kv_used
        self._read_counts(row)
        self.adapter_room[row] = 0.5 if len(load.adapters) < load.max_adapters else 0.0
        self.scraped_at[row] = -math.inf if endpoint.scraped_at is None else endpoint.scraped_at
        open_until = endpoint.breaker.open_until
        self.open_until[row] = -math.inf if open_until is None else open_until
        self.backoff_until[row] = endpoint.backoff.until
        self.away[row] = away = endpoint.is_away or endpoint.is_withheld
        self.unreadable[row] = unreadable = not endpoint.is_readable
        if open_until is not None or away or unreadable:
            self.troubled.add(row)
        else:
            self.troubled.discard(row)
        if endpoint.backoff.clients:
            self.tells_clients_apart.add(row)
        else:
            self.tells_clients_apart.discard(row)
        if endpoint.backoff.until or endpoint.backoff.clients:
            self.has_refused.add(row)
        else:
            self.has_refused.discard(row)
        if load.adapters != self._loaded.get(row, _NONE):
            self._forget_adapters(row)
            self._loaded[row] = load.adapters
            for name in load.adapters:
                self._adapters.setdefault(name, set()).add(row)

    def _read_counts(self, row: int) -> None:
        endpoint = self.endpoints[row]
        assert endpoint is not None, "a free row does not change"
        self.sent[row] = endpoint.sent_since_scrape
        self.in_flight[row] = endpoint.in_flight
        self.tokens[row] = endpoint.in_flight_tokens
        self.ttft_s[row] = endpoint.ttft_s or 0.0

    def _forget_adapters(self, row: int) -> None:
        for name in self._loaded.pop(row, _NONE):
            self._adapters[name].discard(row)
            if not self._adapters[name]:
                del self._adapters[name]

    def _grow(self, rows: int) -> None:
        floats = (
            "waiting running kv_used sent in_flight tokens ttft_s adapter_room scraped_at open_until "
            "backoff_until"
        )
        kinds = (floats, np.float64), ("identity", np.uint64), ("away unreadable", np.bool_)
        for names, kind in kinds:
            for name in names.split():
                grown = np.zeros(rows, kind)
                before = self._columns.get(name)
                if before is not None:
                    grown[: len(before)] = before
                self._columns[name] = grown
                setattr(self, name, grown)
