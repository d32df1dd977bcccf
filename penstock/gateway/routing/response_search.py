"""Finds the endpoints that have a stored response: those known to have it, or those that say so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from urllib.parse import quote

from penstock.gateway.requests.named_response import RESPONSES
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.pick_request import OWNER_UNAVAILABLE
from penstock.gateway.routing.response_owners import ResponseOwners
from penstock.gateway.upstream.exchange import Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.fetch import TooLargeError, read_reply
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, shown

MAX_ASKED = 32
"""Endpoints that are asked at the same time, for all requests together: anyone may invent ids."""
ASK_S = 10.0
"""Seconds that an endpoint may take to say whether it has a response."""
MAX_READ = 1 << 20
"""Bytes of a response that are read, so that its connection can be kept."""
_UNSURE = frozenset({408, 429})
"""Statuses below 500 that do not say whether the endpoint has a response."""
_DENIED = frozenset({401, 403})
"""Statuses by which an endpoint refuses the key: the client's, or the gateway's own."""
_NOT_IMPLEMENTED = 501
"""The one of 500 and above that says so."""
_NOT_ASKED = frozenset(
    {b"content-type", b"content-length", b"content-encoding", b"expect", b"accept-encoding"}
)
"""Headers of a request that asks for a response have none of these: it has no body, and its reply is read."""


class ResponseSearch:
    """Asks endpoints, as a gateway that has started lately, or of which there are several, does not know all
    responses."""

    def __init__(self, pool: EndpointPool, owners: ResponseOwners) -> None:
        self._pool = pool
        self._owners = owners
        self._asking = asyncio.Semaphore(MAX_ASKED)

    async def find_owner(
        self, id: str, headers: Headers, now: float, *, previous: bool = False
    ) -> Sequence[Endpoint] | None:
        """The endpoints that have the response, the best one first; None: there is one at most. ``headers``
        are those of the request that names it, with the client's key. ``previous``: the request continues
        it. Raises ApiError."""
        known, endpoints = self._owners.of(id), self._pool.endpoints
        others = [endpoint for endpoint in endpoints if endpoint not in known and _keeps(endpoint)]
        if len(endpoints) < 2:
            return None
        is_there = any(each.is_ready(now) if previous else each.is_there(now) for each in known)
        if is_there or (known and not others):
            return known
        answers = await self._ask(others, id, headers, now)
        for endpoint, status in answers.items():
            if status == 200:
                self._owners.learn(id, endpoint)
                return [endpoint]
        if known:
            return known
        for endpoint, status in answers.items():
            if status in _DENIED and not endpoint.upstream.key_source:
                return [endpoint]  # which tells the client so
        if silent := [
            each.url for each, status in answers.items() if _is_unsure(status) or status in _DENIED
        ]:
            raise unavailable(
                f"Nobody has response {shown(id)!r}, but {', '.join(silent)}, which may have it, "
                "cannot be asked.",
                OWNER_UNAVAILABLE,
            )
        if previous:
            raise ApiError(
                404,
                f"Previous response with id {shown(id)!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        raise ApiError(404, f"Response with id {shown(id)!r} not found.", code="response_not_found")

    async def elsewhere(
        self, id: str, headers: Headers, now: float, failed: Set[Endpoint]
    ) -> Sequence[Endpoint]:
        """Endpoints that have the response as well, besides those that ``failed``."""
        if known := [endpoint for endpoint in self._owners.of(id) if endpoint not in failed]:
            return known
        endpoints = self._pool.endpoints
        untried = [endpoint for endpoint in endpoints if endpoint not in failed and _keeps(endpoint)]
        answers = await self._ask(untried, id, headers, now)
        return [endpoint for endpoint, status in answers.items() if status == 200]

    async def _ask(
        self, endpoints: Sequence[Endpoint], id: str, headers: Headers, now: float
    ) -> dict[Endpoint, int]:
        """The statuses with which endpoints answer a request for the response, until one has it; 0: none, or
        the endpoint is not ready."""
        headers = [header for header in headers if header[0] not in _NOT_ASKED]
        target = self._pool.own_target(f"{RESPONSES}/{quote(id, safe='')}")
        request = UpstreamRequest(b"GET", target, headers, b"")
        ready = [endpoint for endpoint in endpoints if endpoint.is_there(now)]
        tasks = {asyncio.ensure_future(self._status(each, request, id)): each for each in ready}
        waiting, answers = set(tasks), {each: 0 for each in endpoints if each not in ready}
        try:
            while waiting and 200 not in answers.values():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                answers |= {tasks[task]: task.result() for task in done}
        finally:
            for task in waiting:
                task.cancel()
        return answers

    async def _status(self, endpoint: Endpoint, request: UpstreamRequest, id: str) -> int:
        search = _IdSearch(id)
        async with self._asking:
            try:
                async with asyncio.timeout(ASK_S):
                    exchange = await self._pool.connections(endpoint).acquire()
                    status = await read_reply(exchange, request, MAX_READ, search.feed)
            except TooLargeError as error:
                status = error.status
            except (UpstreamError, TimeoutError):
                return 0
        return 404 if status == 200 and not search.found else status


class _IdSearch:
    """Whether a body has the id: a page for every path has not, and is no response."""

    def __init__(self, id: str) -> None:
        self.found = False
        self._id = id.encode()
        self._end = b""
        """The last bytes of the body so far, with which the id may begin."""

    def feed(self, data: bytes) -> None:
        body = self._end + data
        self.found = self.found or self._id in body
        self._end = body[-len(self._id) :]


def _keeps(endpoint: Endpoint) -> bool:
    """Whether the endpoint may have responses: it speaks their API, as far as is known."""
    return endpoint.apis is None or "responses" in endpoint.apis


def _is_unsure(status: int) -> bool:
    """Whether a status does not say that the endpoint lacks the response."""
    return status == 0 or (status >= 500 and status != _NOT_IMPLEMENTED) or status in _UNSURE
