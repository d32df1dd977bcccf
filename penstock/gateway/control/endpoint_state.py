"""How an endpoint is, in words."""

from __future__ import annotations

from typing import Any

from penstock.gateway.routing.endpoint import Endpoint


def obstacles(endpoint: Endpoint, now: float, client: str = "", model: str = "") -> list[str]:
    """Why an endpoint gets no requests, or only if no other is better; empty: nothing keeps them from it.
    ``client``, ``model``: of a request, for which it may have asked for a pause."""
    found = []
    if endpoint.removed:
        found.append("removed")
    if endpoint.drained:
        found.append("drained")
    if endpoint.held:
        found.append(f"held: {endpoint.held}")
    if (until := endpoint.breaker.open_until) is not None:
        if until > now:
            found.append(f"circuit breaker open for {until - now:.1f} s")
        else:
            takes = "takes one" if endpoint.breaker.allows(now) else "has one"
            found.append(f"circuit breaker half open: it {takes} for a test")
    if endpoint.is_away:
        found.append("no connection")
    elif not endpoint.is_readable:
        found.append("metrics cannot be read")
    if (wait_s := endpoint.backoff.until_for(client, model) - now) > 0:
        found.append(f"wants no requests for {wait_s:.1f} s")
    return found


def endpoint_row(endpoint: Endpoint, now: float) -> dict[str, Any]:
    """One endpoint of ``/status``."""
    load = endpoint.reported_load
    return {
        "endpoint": endpoint.url,
        "pool": endpoint.pool,
        "role": endpoint.role,
        "ready": endpoint.is_ready(now),
        "obstacles": obstacles(endpoint, now),
        "in_flight": endpoint.in_flight,
        "waiting": None if load is None else load.waiting,
        "running": None if load is None else load.running,
        "kv_used": None if load is None else load.kv_used,
        "failures": [each.row() for each in endpoint.failures],
    }
