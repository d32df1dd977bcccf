"""``POST /admin/endpoints/drain`` and ``/undrain``: one endpoint gets no more requests, or some again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.workers.drained_endpoints import DrainedEndpoints
from penstock.gateway.workers.shared_controls import KeeperSilent
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, names_in_error, shown
from penstock.http.operation_options import read_parameter_body, read_parameters, refused_value
from penstock.http.request import HttpRequest

log = logging.getLogger(__name__)

DRAIN, UNDRAIN = "/admin/endpoints/drain", "/admin/endpoints/undrain"
ENDPOINT_PATHS = frozenset({DRAIN, UNDRAIN})
MAX_WAIT_S = 3600.0
LOOK_S = 0.05
"""Interval of looks at the requests that still run."""
MAX_WAITING = 64
"""Calls of this worker that wait."""


class EndpointRoutes:
    """The handlers. ``elsewhere``: requests of the other workers at an endpoint."""

    def __init__(
        self, pool: EndpointPool, drained: DrainedEndpoints, elsewhere: Callable[[Endpoint], int]
    ) -> None:
        self._pool = pool
        self._drained = drained
        self._elsewhere = elsewhere
        self._waiting = 0
        self._ending = False

    def end_waits(self) -> None:
        """The worker ends when its calls do: none waits from here on."""
        self._ending = True

    async def answer(self, http: HttpRequest) -> dict[str, Any]:
        """The reply to an administrator's request for one of ENDPOINT_PATHS. Raises ApiError."""
        parameters = read_parameters(http, await read_parameter_body(http))
        drains = http.path == DRAIN
        allowed = ("url", "wait") if drains else ("url",)
        for name in parameters:
            if name not in allowed:
                raise ApiError(
                    400, f"{http.path} takes {', '.join(allowed)}, not {shown(name)!r}.", param=name
                )
        wait_s = _seconds(parameters.get("wait"))
        endpoint = self.find(parameters.get("url", ""))
        if endpoint.drained != drains:
            log.info("endpoint %s is %s", endpoint.url, "drained" if drains else "no longer drained")
        try:
            await self._drained.change(endpoint.url, drained=drains)
        except KeeperSilent:
            message = "Not all workers have answered, so this may not hold for all of them: call again."
            raise unavailable(message, "undecided") from None
        if wait_s:
            await self._wait(http, endpoint, wait_s)
        return {"endpoint": endpoint.url, "drained": drains, "running": self._running(endpoint)}

    def find(self, url: str) -> Endpoint:
        """The endpoint with this label, or the only one with this URL. Raises ApiError."""
        found = self._pool.named(url.rstrip("/"))
        if len(found) == 1:
            return found[0]
        if found:
            named = names_in_error([each.url for each in found])
            raise ApiError(400, f"url {shown(url)!r} stands for several endpoints: {named}.", param="url")
        named = names_in_error([each.url for each in self._pool.endpoints]) or "none"
        message = f"url {shown(url)!r} is no endpoint of this gateway; its endpoints are {named}."
        raise ApiError(404 if url else 400, message, param="url", code="no_such_endpoint")

    def _running(self, endpoint: Endpoint) -> int:
        return endpoint.own_in_flight + self._elsewhere(endpoint)

    async def _wait(self, http: HttpRequest, endpoint: Endpoint, limit_s: float) -> None:
        """Until no request runs there, ``limit_s`` have passed, or the client or the worker leaves."""
        if self._waiting >= MAX_WAITING:
            raise unavailable(f"{MAX_WAITING} calls wait already.", "too_many_calls")
        self._waiting += 1
        until = asyncio.get_running_loop().time() + limit_s
        try:
            while self._running(endpoint) and not (self._ending or http.disconnected):
                if (left_s := until - asyncio.get_running_loop().time()) <= 0:
                    break
                await asyncio.sleep(min(LOOK_S, left_s))
        finally:
            self._waiting -= 1


def _seconds(given: str | None) -> float:
    """Raises ApiError."""
    try:
        seconds = float(given or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise refused_value("wait", given or "", f"0 to {MAX_WAIT_S:g} seconds")
    return seconds
