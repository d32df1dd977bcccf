"""Picks the endpoint for a request: filters, weighted scorers, and a choice by score."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.gateway.requests.request_body import RequestBody
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.prefix_affinity import PrefixIndex, prefix_blocks

OWNER_UNAVAILABLE = "owner_unavailable"
"""Reason of a refusal: the endpoints that have the response which the request names are not ready."""
MOST_SESSIONS = 1 << 16
"""Sessions remembered; the least recently used ones are evicted."""


@dataclass(slots=True)
class PickRequest:
    """The properties of a request that picking uses."""

    model: str = ""
    blocks: Sequence[int] = ()
    """Hashes from :func:`penstock.gateway.routing.prefix_affinity.prefix_blocks`."""
    session: str | None = None
    tokens: int = 0
    """Estimated prompt tokens."""
    priority: int = 0
    """Negative: the request is rejected when all endpoints are saturated."""
    ttft_slo_s: float | None = None
    subset: frozenset[str] | None = None
    """URLs of the endpoints that Envoy allows; None: all."""
    owners: Sequence[Endpoint] | None = None
    """Endpoints that have the stored response that the request names, the best one first; None: it names
    none."""
    tried: set[Endpoint] = field(default_factory=set)
    """Endpoints that this request was sent to before."""


def pick_request(body: RequestBody | None, session: str | None, ttft_slo_s: float | None) -> PickRequest:
    """The properties of a request for picking; ``body`` is None when the request does not generate."""
    request = PickRequest(session=session, ttft_slo_s=ttft_slo_s)
    if body is not None:
        request.session = session or body.session
        request.model, request.priority, request.tokens = body.model, body.priority, body.tokens
        request.blocks = prefix_blocks(body.model, body.prompt)
    return request


class NoEndpointError(Exception):
    """No endpoint may be sent the request. ``status`` is 429 or 503, ``reason`` a value of the label."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


Scorer = Callable[[PickRequest, Sequence[Endpoint], float], list[float]]
"""Maps (request, candidates, now) to one score per candidate, 0 (worst) to 1."""


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """When an endpoint is saturated, and when affinity is ignored."""

    waiting: int = 5
    """An endpoint with at least this many waiting requests is saturated."""
    kv_used: float = 0.95
    """An endpoint with at least this share of its KV cache in use is saturated."""
    affinity_excess: float = 1.5
    """Affinity is ignored for an endpoint with more requests than this multiple of those at the least
    loaded one, plus :data:`AFFINITY_SLACK`."""


AFFINITY_SLACK = 8
"""Requests; with fewer a multiple is meaningless."""


class Picker:
    """Picks endpoints, and remembers the picks for affinity."""

    def __init__(
        self,
        weights: dict[str, float],
        *,
        limits: PickerLimits | None = None,
        choose: Literal["max-score", "power-of-two"] = "max-score",
        rng: random.Random | None = None,
    ) -> None:
        """``weights`` by scorer name, see :data:`SCORERS`."""
        self.index = PrefixIndex()
        self._limits = limits or PickerLimits()
        self._choose = choose
        self._rng = rng or random.Random()
        self._sessions: OrderedDict[int, Endpoint] = OrderedDict()
        """By Python's hash of the session's name, which a client chooses at any length."""
        scorers: dict[str, Scorer] = {
            **_LOAD_SCORERS,
            "prefix": self._prefix,
            "session": self._session,
        }
        self._scorers = [(scorers[name], weight) for name, weight in weights.items() if weight]

    def pick(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> Endpoint:
        """The endpoint to send ``request`` to. Raises NoEndpointError."""
        return self.ranked(request, endpoints, now, 1)[0]

    def ranked(
        self, request: PickRequest, endpoints: Sequence[Endpoint], now: float, most: int
    ) -> list[Endpoint]:
        """The endpoint to send ``request`` to, followed by those for retries, best first; at most ``most`` in
        all. Raises NoEndpointError."""
        candidates = self._candidates(request, endpoints, now)
        if len(candidates) == 1:
            return [self._remember_pick(request, candidates[0])]
        scores = [0.0] * len(candidates)
        for scorer, weight in self._scorers:
            for row, score in enumerate(scorer(request, candidates, now)):
                scores[row] += weight * score
        choice = self._choose_row(scores)
        picked = self._remember_pick(request, candidates[choice])
        if most == 1:
            return [picked]
        rest = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [picked, *(candidates[row] for row in rest if row != choice)][:most]

    def has_candidate(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> bool:
        """Whether :meth:`pick` would find an endpoint."""
        try:
            return bool(self._candidates(request, endpoints, now))
        except NoEndpointError:
            return False

    def forget(self, endpoint: Endpoint) -> None:
        """Remove the memory of an endpoint that has left the pool."""
        self.index.forget(endpoint)
        for session in [key for key, value in self._sessions.items() if value is endpoint]:
            del self._sessions[session]

    # -- filters

    def _candidates(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[Endpoint]:
        allowed, subset = endpoints, request.subset
        if subset is not None:
            allowed = [endpoint for endpoint in endpoints if endpoint.url in subset]
        if request.owners is not None:
            return [self._owner(request, request.owners, allowed, now)]
        ready = _without_errors([endpoint for endpoint in allowed if endpoint.is_ready(now)], now)
        fresh = _readable([endpoint for endpoint in ready if endpoint not in request.tried])
        if not fresh:
            if ready:
                raise NoEndpointError(
                    503, "all_failed", "Every model server that is ready has failed this request."
                )
            raise NoEndpointError(503, "none_ready", f"None of {len(allowed)} model servers is ready.")
        if request.priority < 0 and all(self._is_saturated(endpoint, now) for endpoint in fresh):
            raise NoEndpointError(
                429, "saturated", "All model servers are busy, and the request has low priority."
            )
        return fresh

    def _owner(
        self, request: PickRequest, owners: Sequence[Endpoint], allowed: Sequence[Endpoint], now: float
    ) -> Endpoint:
        """The best endpoint that has the response, however busy. Raises NoEndpointError."""
        for endpoint in owners:
            if endpoint in allowed and endpoint not in request.tried and endpoint.is_ready(now):
                return endpoint
        urls = ", ".join(endpoint.url for endpoint in owners)
        raise NoEndpointError(
            503, OWNER_UNAVAILABLE, f"The response that the request names is at {urls}, which is not ready."
        )

    def _is_saturated(self, endpoint: Endpoint, now: float) -> bool:
        load = endpoint.fresh_load(now)
        if load is None:
            return False
        return (
            load.waiting + endpoint.sent_since_scrape >= self._limits.waiting
            or load.kv_used >= self._limits.kv_used
        )

    # -- choice

    def _choose_row(self, scores: list[float]) -> int:
        rows = range(len(scores))
        if self._choose == "power-of-two":
            rows_tried = self._rng.sample(rows, 2)
            return max(rows_tried, key=scores.__getitem__)
        best = max(scores)
        return self._rng.choice([row for row in rows if scores[row] == best])

    def _remember_pick(self, request: PickRequest, endpoint: Endpoint) -> Endpoint:
        if request.blocks:
            self.index.note(request.blocks, endpoint)
        if request.session is not None:
            session = hash(request.session)
            self._sessions[session] = endpoint
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return endpoint

    # -- scorers with a memory

    def _prefix(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
        """Share of the prompt's blocks that the endpoint was sent before."""
        if not request.blocks:
            return [0.0] * len(endpoints)
        total = len(request.blocks)
        matched = self.index.matched(request.blocks, endpoints)
        return self._bounded([length / total for length in matched], endpoints)

    def _session(self, request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
        """1 for the endpoint that served the session last."""
        last = None if request.session is None else self._sessions.get(hash(request.session))
        if last is None:
            return [0.0] * len(endpoints)
        return self._bounded([float(endpoint is last) for endpoint in endpoints], endpoints)

    def _bounded(self, scores: list[float], endpoints: Sequence[Endpoint]) -> list[float]:
        """Affinity scores, 0 for endpoints with many more requests than the least loaded one."""
        if not any(scores):
            return scores
        busy = _requests(endpoints)
        most = self._limits.affinity_excess * min(busy) + AFFINITY_SLACK
        return [score if count <= most else 0.0 for score, count in zip(scores, busy, strict=True)]


def _without_errors(endpoints: list[Endpoint], now: float) -> list[Endpoint]:
    """Those that do not answer with errors; all if all do."""
    return [endpoint for endpoint in endpoints if endpoint.breaker.allows(now)] or endpoints


def _readable(endpoints: list[Endpoint]) -> list[Endpoint]:
    """Those whose /metrics can be read. All if most cannot: what ails the scrapes need not ail requests, and
    a few endpoints would not bear the load of all."""
    readable = [endpoint for endpoint in endpoints if endpoint.is_readable]
    return readable if 2 * len(readable) >= len(endpoints) else endpoints


# -- scorers -------------------------------------------------------------------------------------------


def _requests(endpoints: Sequence[Endpoint]) -> list[int]:
    """Requests at each endpoint from all clients: its scraped counts, plus requests sent since."""
    counts = []
    for endpoint in endpoints:
        load = endpoint.load
        count = load.waiting + load.running + endpoint.sent_since_scrape
        counts.append(count if count > endpoint.in_flight else endpoint.in_flight)
    return counts


def _fewest(counts: list[int]) -> list[float]:
    """Scores from counts: 1 for the smallest, 0 for the largest, all 1 when they are equal."""
    low, high = min(counts), max(counts)
    if high == low:
        return [1.0] * len(counts)
    return [(high - count) / (high - low) for count in counts]


def _queue(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
    return _fewest([endpoint.load.waiting + endpoint.sent_since_scrape for endpoint in endpoints])


def _running(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
    return _fewest(_requests(endpoints))


def _kv(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
    return [1.0 - endpoint.load.kv_used for endpoint in endpoints]


def _tokens(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
    return _fewest([endpoint.in_flight_tokens for endpoint in endpoints])


def _lora(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
    """1 where the adapter of that name is loaded, 0.5 where there is room for it."""
    scores = []
    for endpoint in endpoints:
        load = endpoint.load
        room = 0.5 if len(load.adapters) < load.max_adapters else 0.0
        scores.append(1.0 if request.model in load.adapters else room)
    return scores


def _slo(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> list[float]:
    """Distance of the average time to first token below the objective, as a share of the objective."""
    slo = request.ttft_slo_s
    if slo is None:
        return [0.0] * len(endpoints)
    return [max(0.0, 1.0 - (endpoint.ttft_s or 0.0) / slo) for endpoint in endpoints]


_LOAD_SCORERS: dict[str, Scorer] = {
    "queue": _queue,
    "running": _running,
    "kv": _kv,
    "tokens": _tokens,
    "lora": _lora,
    "slo": _slo,
}
SCORERS = (*_LOAD_SCORERS, "prefix", "session")
"""Names of all scorers."""
