"""Picks the endpoint for a request: filters, weighted scorers, and a choice by score."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_columns import EndpointColumns, Flags, Floats, Rows
from penstock.gateway.routing.pick_request import OWNER_UNAVAILABLE, NoEndpointError, PickRequest
from penstock.gateway.routing.prefix_affinity import PrefixIndex
from penstock.gateway.routing.rendezvous import rendezvous_weights, stable_hash
from penstock.gateway.routing.scorers import LOAD_SCORERS, Scorer
from penstock.gateway.routing.usable_endpoints import PickerLimits, UsableEndpoints

MAX_SESSIONS = 1 << 16
"""Sessions remembered; the least recently used ones are evicted."""
AFFINITY_SLACK = 8
"""Requests; with fewer a multiple is meaningless."""
MOSTLY, NEARLY = 0.8, 0.05
"""Shares of a prompt. Where so much of it is cached, a new session's hash chooses among the endpoints that
have about as much."""
UNNAMED = 0.5
"""What the hash of a prompt without a session counts: it may never come again. Chosen, as MOSTLY is, by
``penstock bench routing`` with one gateway and with three."""


class Picker:
    """Picks endpoints, and remembers the picks for affinity."""

    def __init__(
        self,
        weights: dict[str, float],
        *,
        limits: PickerLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """``weights`` by scorer name, see :data:`SCORERS`."""
        self.on_pick: Callable[[Endpoint, Sequence[int], int | None], None] = lambda *pick: None
        """Called with each pick: the endpoint, the prompt's blocks and the hash of the session."""
        self._columns = EndpointColumns()
        self.index = PrefixIndex(self._columns)
        self._limits = limits or PickerLimits()
        self._filters = UsableEndpoints(self._columns, self._limits)
        self._rng = rng or random.Random()
        self._sessions: OrderedDict[int, Endpoint] = OrderedDict()
        """Endpoints by Python's hash of the session's name, which a client chooses at any length."""
        scorers: dict[str, Scorer] = {
            **LOAD_SCORERS,
            "prefix": self._prefix,
            "session": self._session,
        }
        self._scorers = [(scorers[name], weight) for name, weight in weights.items() if weight]
        self._names = [name for name, weight in weights.items() if weight]

    def pick(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> Endpoint:
        """The endpoint to send ``request`` to, remembered for affinity. Raises NoEndpointError."""
        (picked,) = self.ranked(request, endpoints, now, 1)
        self.remember(request, picked)
        return picked

    def ranked(
        self, request: PickRequest, endpoints: Sequence[Endpoint], now: float, most: int
    ) -> list[Endpoint]:
        """The endpoint to send ``request`` to, followed by those for retries, best first; at most ``most`` in
        all. Whoever sends it calls :meth:`remember`. Raises NoEndpointError."""
        rows = self._candidates(request, endpoints, now)
        if len(rows) == 1:
            return [self._endpoint(rows[0])]
        scores = np.zeros(len(rows))
        for scorer, weight in self._scorers:
            if (some := scorer(request, self._columns, rows)) is not None:
                scores += weight * some
        choice = self._choose_index(scores)
        picked = self._endpoint(rows[choice])
        if most == 1:
            return [picked]
        best = np.argsort(-scores, kind="stable")
        return [picked, *(self._endpoint(rows[index]) for index in best[:most] if index != choice)][:most]

    def scores(
        self, request: PickRequest, endpoints: Sequence[Endpoint], now: float
    ) -> dict[Endpoint, tuple[float, dict[str, float]]]:
        """The scores of those that :meth:`ranked` chooses among: the sum, and that of each scorer times its
        weight. Nothing is remembered."""
        try:
            rows = self._candidates(request, endpoints, now)
        except NoEndpointError:
            return {}
        parts = {}
        for name, (scorer, weight) in zip(self._names, self._scorers, strict=True):
            some = scorer(request, self._columns, rows)
            parts[name] = np.zeros(len(rows)) if some is None else weight * some
        found = {}
        for at, row in enumerate(rows):
            own = {name: round(float(part[at]), 4) for name, part in parts.items()}
            found[self._endpoint(row)] = round(sum(own.values()), 4), own
        return found

    def has_candidate(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> bool:
        """Whether :meth:`pick` would find an endpoint."""
        try:
            return len(self._candidates(request, endpoints, now)) > 0
        except NoEndpointError:
            return False

    def least_backoff_s(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> float:
        """Seconds until the first of the endpoints that want no requests of this client takes some again."""
        rows = self._columns.rows(self._allowed(request, endpoints))
        waits = self._filters.backoff_until(rows, request.client, request.model) - now
        waits = waits[waits > 0.0]
        return float(waits.min()) if len(waits) else 0.0

    def forget(self, endpoint: Endpoint) -> None:
        """Remove the memory of an endpoint that has left the pool."""
        self.index.forget(endpoint)
        self._columns.forget(endpoint)
        for session in [key for key, value in self._sessions.items() if value is endpoint]:
            del self._sessions[session]

    # -- filters

    def _allowed(self, request: PickRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if request.subset is None:
            return endpoints
        return [endpoint for endpoint in endpoints if endpoint.url in request.subset]

    def _candidates(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> Rows:
        """The rows that are chosen among. Raises NoEndpointError."""
        allowed = self._allowed(request, endpoints)
        rows = self._columns.rows(allowed)
        if request.owners is not None:
            owner = self._owner(request, request.owners, allowed, now)
            return np.array([self._columns.row(owner)])
        rows = self._filters.usable(rows, request.tried, now)
        if not len(rows):
            if not request.tried.isdisjoint(allowed):
                raise NoEndpointError(
                    503, "all_failed", "Every model server that is ready has failed this request."
                )
            raise NoEndpointError(503, "none_ready", f"None of {len(allowed)} model servers is ready.")
        if self._columns.has_refused:
            until = self._filters.backoff_until(rows, request.client, request.model)
            if (waits := until > now).any():
                if waits.all():
                    raise self._backing_off(rows, until, now)
                rows = rows[~waits]
        if request.priority < 0 and self._filters.are_saturated(rows, now):
            raise NoEndpointError(
                429, "saturated", "All model servers are busy, and the request has low priority."
            )
        return rows

    def _backing_off(self, rows: Rows, until: Floats, now: float) -> NoEndpointError:
        soonest = int(until.argmin())
        return NoEndpointError(
            self._endpoint(rows[soonest]).backoff.status,
            "backing_off",
            "Every model server has refused requests, and said when to come back.",
            retry_after_s=float(until[soonest]) - now,
        )

    def _endpoint(self, row: np.intp) -> Endpoint:
        endpoint = self._columns.endpoints[row]
        assert endpoint is not None, "its list is forgotten with it"
        return endpoint

    def _owner(
        self, request: PickRequest, owners: Sequence[Endpoint], allowed: Sequence[Endpoint], now: float
    ) -> Endpoint:
        """The best endpoint that has the response, however busy. One that is drained takes no request that
        continues it, but those about it: nobody else can answer them. Raises NoEndpointError."""
        for endpoint in owners:
            ready = endpoint.is_ready(now) if request.generates else endpoint.is_there(now)
            if ready and endpoint in allowed and endpoint not in request.tried:
                return endpoint
        urls = ", ".join(endpoint.url for endpoint in owners)
        raise NoEndpointError(
            503, OWNER_UNAVAILABLE, f"The response that the request names is at {urls}, which is not ready."
        )

    # -- choice

    def _choose_index(self, scores: Floats) -> int:
        best = np.flatnonzero(scores == scores.max())
        return int(best[self._rng.randrange(len(best))] if len(best) > 1 else best[0])

    # -- memory

    def remember(self, request: PickRequest, endpoint: Endpoint) -> None:
        """The endpoint is sent the request."""
        session = None if request.session is None else hash(request.session)
        self.learn(endpoint, request.blocks, session)
        self.on_pick(endpoint, request.blocks, session)

    def learn(self, endpoint: Endpoint, blocks: Sequence[int], session: int | None) -> None:
        """Remember a pick, of this worker or another one; ``session`` is a hash."""
        if endpoint.removed:  # another one may speak of it for a while
            return
        if blocks:
            self.index.note(blocks, endpoint)
        if session is not None:
            self._sessions[session] = endpoint
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    # -- scorers with a memory

    def _prefix(self, request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
        """Shares that are cached, else the choice of the first block's hash, unless the session's decides."""
        shares = self._cached_shares(request)
        known = None if shares is None else shares[rows]
        if known is not None and known.any():
            scores = self._bounded(known, rows)
            if scores.any():
                return scores
        if not request.blocks or (request.session is not None and "session" in self._names):
            return None
        hashed = self._hashed(request.blocks[0], rows, None if known is None else known > 0.0)
        return None if hashed is None else UNNAMED * hashed

    def cached_share(self, request: PickRequest, endpoints: Sequence[Endpoint]) -> float:
        """The largest share of the prompt that one of the endpoints, at least one, has cached, by what is
        known or guessed."""
        shares = self._cached_shares(request)
        if shares is None:
            return 0.0
        found = (self._columns.find_row(endpoint) for endpoint in endpoints)
        return max(float(shares[row]) if row >= 0 else 0.0 for row in found)

    def _cached_shares(self, request: PickRequest) -> Floats | None:
        """Share of the prompt that endpoints have cached, or of its blocks that they were sent before, by
        row; None: nothing is known."""
        known = {} if request.prompt is None else request.prompt.shares
        if not request.blocks and not known:
            return None
        shares = self.index.shares(request.blocks) if request.blocks else np.zeros(self._columns.size)
        for endpoint, share in known.items():
            if (row := self._columns.find_row(endpoint)) >= 0:
                shares[row] = share
        return shares

    def _session(self, request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
        """1 for the endpoint that served the session last, else for the one that the session's hash names."""
        if request.session is None:
            return None
        left_out = None
        if (last := self._sessions.get(hash(request.session))) is not None:
            left_out = rows == columns.find_row(last)
            scores = self._bounded(left_out.astype(np.float64), rows)
            if scores.any():
                return scores
        if "prefix" in self._names and (shares := self._cached_shares(request)) is not None:
            most = shares[rows].max()
            if most >= MOSTLY:
                elsewhere = shares[rows] < most - NEARLY
                left_out = elsewhere if left_out is None else left_out | elsewhere
        return self._hashed(stable_hash(request.session.encode(errors="replace")), rows, left_out)

    def _bounded(self, known: Floats, rows: Rows) -> Floats:
        """Scores by what is known, 0 for endpoints with many more requests than the least loaded one."""
        busy = self._columns.requests(rows)
        return np.where(busy > self._limits.affinity_excess * busy.min() + AFFINITY_SLACK, 0.0, known)

    def _hashed(self, key: int, rows: Rows, left_out: Flags | None) -> Floats | None:
        """1 for the endpoint with the highest weight for ``key`` that is not ``left_out`` and does not have
        many more requests than the mean; None: there is none."""
        busy = self._columns.requests(rows)
        weights = rendezvous_weights(self._columns.identity[rows], key)
        weights[busy > self._limits.hash_excess * busy.mean() + AFFINITY_SLACK] = 0
        if left_out is not None:
            weights[left_out] = 0
        scores = np.zeros(len(rows))
        scores[weights.argmax()] = 1.0
        return scores if weights.any() else None


SCORERS = (*LOAD_SCORERS, "prefix", "session")
"""Names of all scorers."""
