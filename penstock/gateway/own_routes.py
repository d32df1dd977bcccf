"""The gateway's own routes: readiness, metrics, version, and what is in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from penstock import __version__
from penstock.gateway.admission.client_keys import ClientKeys
from penstock.gateway.control.control_routes import OPERATIONS, ControlRoutes
from penstock.gateway.control.dry_run import ROUTE
from penstock.gateway.control.endpoint_routes import ENDPOINT_PATHS
from penstock.gateway.control.endpoint_state import endpoint_row
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.http.access_keys import check_local
from penstock.http.admission import send_readiness, unavailable
from penstock.http.errors import ApiError, encode_json, wrong_method
from penstock.http.request import HttpRequest
from penstock.metrics.exposition import CONTENT_TYPE
from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.shared_exposition import SharedExposition
from penstock.wire.messages import PAUSE, PAUSED, SLEEP, SLEEPING

OWN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/version", "/status", "/debug/gc"})
"""Routes of the gateway itself; requests for them are not counted."""
OWN_METHODS = ("GET", "HEAD", "POST")
"""POST is for /ping, as on API servers."""

_CLOSED = {
    PAUSE: (PAUSED, "The model servers are paused until POST /resume."),
    SLEEP: (SLEEPING, "The model servers sleep until POST /wake_up."),
}


def _shutting_down() -> ApiError:
    return unavailable("The gateway is shutting down.", "draining")


class OwnRoutes:
    """Answers requests for the gateway itself, and knows whether it takes others."""

    def __init__(
        self,
        keys: ClientKeys,
        pool: EndpointPool,
        collector: GarbageCollector,
        clock: Callable[[], float],
        expose: Callable[[], Awaitable[bytes]],
        control: ControlRoutes,
        *,
        loopback_administers: bool,
    ) -> None:
        """``expose`` makes the text of ``/metrics``. ``loopback_administers``: without keys, administrative
        routes answer connections from a loopback address."""
        self._keys = keys
        self._pool = pool
        self._collector = collector
        self._clock = clock
        self._exposition = SharedExposition(expose)
        self._control = control
        self._loopback_administers = loopback_administers
        self._leaving = False
        self.draining = False
        """Whether other requests are refused, as the gateway shuts down."""

    def leave(self) -> None:
        """A shutdown was announced: requests are still relayed, but ``/ready`` answers 503."""
        self._leaving = True

    def drain(self) -> None:
        """Refuse requests from here on."""
        self._control.endpoints.end_waits()
        self.draining = True

    def check_open(self) -> None:
        """Raises ApiError once requests are refused."""
        if self.draining:
            raise _shutting_down()

    def is_ready(self) -> bool:
        """Whether load balancers should send requests: one would be relayed to a model server."""
        return not (self._leaving or self.draining) and "" in self._reachable()

    def _reachable(self) -> list[str]:
        """Of each model server that is there, which state has it refuse requests; empty: none."""
        now = self._clock()
        return [self._control.closed(each) for each in self._pool.endpoints if each.is_ready(now)]

    async def answer(self, http: HttpRequest) -> None:
        """Answer a request whose path is one of OWN_PATHS. Raises ApiError."""
        path = http.path
        if self._keys.guards(path):
            await self._keys.checked(path, http.fields)
        else:
            check_local(http, unix_socket=None, loopback=self._loopback_administers)
        if http.method not in OWN_METHODS:
            raise wrong_method(path, http.method, OWN_METHODS)
        if path == "/metrics":
            await http.reply_json(await self._exposition.get(), kind=CONTENT_TYPE.encode())
        elif path == "/version":
            await http.reply_json(json.dumps({"version": __version__}).encode())
        elif path == "/status":
            await http.reply_json(encode_json(self._status()))
        elif path == "/debug/gc":
            report = {"processes": {"gateway": self._collector.report()}, "failed": {}}
            await http.reply_json(msgspec.json.encode(report))
        elif path == "/health":
            await http.reply_json(b"{}")
        else:
            await self._send_readiness(http)

    def _status(self) -> dict[str, Any]:
        """How the endpoints are, as this worker knows it: with the requests and failures of all."""
        now = self._clock()
        return {
            "kind": "gateway",
            "version": __version__,
            "time": time.time(),
            "endpoints": [endpoint_row(each, now) for each in self._pool.endpoints],
        }

    async def answer_control(self, http: HttpRequest) -> None:
        """Answer an administrator's request whose path is one of OPERATIONS or ENDPOINT_PATHS. Clients' keys
        do not open it, also where there are no others. Raises ApiError."""
        path = http.path
        if self._keys.guards(path):
            self._keys.check_admin(path, http.fields)
        else:
            check_local(http, unix_socket=None, loopback=self._loopback_administers)
        self.check_open()
        if path in OPERATIONS:
            await self._control.answer(http)
        elif http.method != "POST":
            raise wrong_method(path, http.method, ("POST",))
        else:
            asked = self._control.dry_run if path == ROUTE else self._control.endpoints
            await http.reply_json(encode_json(await asked.answer(http)))

    def controls(self, path: str) -> bool:
        """Whether a request is for all servers of a pool, or for one endpoint, and there is anybody who may
        administer them."""
        return (path in OPERATIONS or path in ENDPOINT_PATHS or path == ROUTE) and (
            self._loopback_administers or self._keys.has_admins
        )

    async def _send_readiness(self, http: HttpRequest) -> None:
        closed = self._reachable()
        ready = closed.count("")
        error, phase = None, "serving"
        if self._leaving or self.draining:
            error, phase = _shutting_down(), "draining"
        elif not ready and closed:
            phase, told = _CLOSED[closed[0]]
            error = unavailable(told, phase)
        elif not ready:
            error = unavailable("No model server is ready.", "none_ready")
            phase = "waiting for a model server"
        servers = len(self._pool.endpoints)
        await send_readiness(
            http, {"phase": phase, "model_servers_ready": ready, "model_servers": servers}, error
        )
