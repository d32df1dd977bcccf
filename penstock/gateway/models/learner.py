"""Learns which models endpoints serve: reads ``GET /v1/models`` of each, seldom, and when there is doubt."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Container, Sequence

from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.model_cards import MAX_LISTING_BYTES, read_listing
from penstock.gateway.models.model_list import models_reply
from penstock.gateway.models.shadows import Shadows
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.upstream.exchange import Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.fetch import TooLargeError, fetch
from penstock.http.access_keys import GOOGLE_KEY
from penstock.http.errors import ApiError
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Interval of checks whether an endpoint has to be read."""
READ_S = 5.0
"""Seconds that an endpoint may take to list its models."""
MAX_READING = 32
"""Endpoints that are read at the same time."""
RETRY_S = 2.0
"""Seconds after which an endpoint that could not be read is read again."""
DOUBT_S = 1.0
"""Minimum seconds between two readings of an endpoint because of doubt: clients may invent names."""
MAX_DOUBTED_PER_S = 200
"""Endpoints that are read in a second because clients name unknown models."""
PATIENCE_S = 2.0
"""Seconds that a request for an unknown model waits for the endpoints to be read."""
_UNSURE = frozenset({408, 429})
"""Statuses below 500 that do not say that the endpoint lists nothing."""
_DENIED = frozenset({401, 403})
"""Statuses of an endpoint that lists models, but not for the gateway: it may be of others, as a hosted API
is, and deny generation as well."""
_NOT_IMPLEMENTED = 501
"""The one of 500 and above that says so."""


class ModelLearner:
    """Keeps a directory up to date. ``clock`` gives seconds."""

    def __init__(
        self,
        pool: EndpointPool,
        directory: ModelDirectory,
        clock: Callable[[], float],
        *,
        interval_s: float = 60.0,
        shadows: Shadows | None = None,
    ) -> None:
        """``interval_s`` 0: nothing is read."""
        self.directory = directory
        self.shadows = shadows
        self._pool = pool
        self._clock = clock
        self._interval_s = interval_s
        headers: Headers = [(b"accept", b"application/json")]
        self._request = UpstreamRequest(b"GET", pool.own_target("/v1/models"), headers, b"")
        self._log_too_large = RateLimitedLog(log, clock=clock)
        self._due_at: dict[Endpoint, float] = {}
        self._read_at: dict[Endpoint, float] = {}
        self._denied: set[Endpoint] = set()
        """Endpoints that did not let the gateway read their listing the last time."""
        self._reading: dict[Endpoint, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(MAX_READING)
        self._refreshed_at = -DOUBT_S
        """When all endpoints were read because of a client, the last time."""
        self._reading_all: asyncio.Task[None] | None = None
        self._rng = random.Random()
        self._checked = 0
        """Generation of the directory in which unserved names were looked for."""
        self._unserved: frozenset[str] = frozenset()

    # -- what the router asks

    @property
    def any_model(self) -> FallbackStep:
        return self.directory.any_model

    async def find_steps(self, asked: str, session: str | None) -> Sequence[FallbackStep]:
        """The steps for a request. A model that is unknown may have been loaded lately: endpoints are read
        again before it is refused. Raises ApiError."""
        asked_at = self._clock()
        try:
            return self.directory.steps(asked, session)
        except ApiError:
            if not asked:
                raise
        await self._read_since(asked_at)
        return self.directory.steps(asked, session)

    def step_at(self, endpoints: Sequence[Endpoint], asked: str, session: str | None) -> FallbackStep:
        return self.directory.step_at(endpoints, asked, session)

    def copy(self, asked: str, session: str | None, request: PickRequest) -> None:
        if self.shadows is not None:
            self.shadows.copy(asked, session, request)

    def reply(self, record: RequestRecord, fields: Container[bytes]) -> bytes | None:
        return models_reply(self.directory, record, google=GOOGLE_KEY in fields)

    def forget(self, endpoint: Endpoint) -> None:
        self._due_at.pop(endpoint, None)
        self._read_at.pop(endpoint, None)
        self._denied.discard(endpoint)
        if self.shadows is not None:
            self.shadows.forget(endpoint)

    def on_unknown_model(self, endpoint: Endpoint) -> None:
        if endpoint in self._pool:
            self._due_at[endpoint] = min(
                self._due_at.get(endpoint, 0.0), self._read_at.get(endpoint, -DOUBT_S) + DOUBT_S
            )

    # -- reading

    async def run(self) -> None:
        """Read every endpoint at once, then again every ``interval_s`` seconds (above 0), or when there is
        doubt."""
        try:
            while True:
                self._read_due()
                self._warn_of_unserved()
                await asyncio.sleep(TICK_S)
        finally:
            for task in (*self._reading.values(), *filter(None, [self._reading_all])):
                task.cancel()

    async def read_all(self, patience_s: float) -> None:
        """Read all endpoints, for at most ``patience_s`` seconds; what is not read then will be later."""
        endpoints = self._pool.endpoints
        if self._interval_s and endpoints:
            await asyncio.wait([self._start(endpoint) for endpoint in endpoints], timeout=patience_s)

    def _read_due(self) -> None:
        now, endpoints = self._clock(), self._pool.endpoints
        for endpoint in endpoints:
            if endpoint.load.adapters and self.directory.add_adapters(endpoint, endpoint.load.adapters):
                self.on_unknown_model(endpoint)
            if now >= self._due_at.get(endpoint, now):
                self._start(endpoint)

    def _warn_of_unserved(self) -> None:
        """Once for each name that nobody serves, when endpoints or names have changed."""
        if self.directory.generation == self._checked or (unserved := self.directory.unserved()) is None:
            return
        self._checked = self.directory.generation
        for each in unserved:
            if each not in self._unserved:
                log.warning("%s", each)
        self._unserved = frozenset(unserved)

    async def _read_since(self, asked_at: float) -> None:
        """Wait until all endpoints have been read since ``asked_at``, for at most PATIENCE_S. Readings that
        clients cause are DOUBT_S apart, whatever their number."""
        if not self._interval_s or self._refreshed_at + self._doubt_s > asked_at + PATIENCE_S:
            return
        while (left_s := asked_at + PATIENCE_S - self._clock()) > 0:
            if self._reading_all is None or self._reading_all.done():
                if self._refreshed_at >= asked_at:
                    return
                self._reading_all = asyncio.ensure_future(self._read_again())
            await asyncio.wait([self._reading_all], timeout=left_s)

    async def _read_again(self) -> None:
        """Read all endpoints once this may be done again."""
        await asyncio.sleep(max(0.0, self._refreshed_at + self._doubt_s - self._clock()))
        self._refreshed_at = self._clock()
        if readings := [self._start(endpoint) for endpoint in self._pool.endpoints]:
            await asyncio.wait(readings)

    @property
    def _doubt_s(self) -> float:
        return max(DOUBT_S, len(self._pool.endpoints) / MAX_DOUBTED_PER_S)

    def _start(self, endpoint: Endpoint) -> asyncio.Task[None]:
        task = self._reading.get(endpoint)
        if task is None:
            task = self._reading[endpoint] = asyncio.ensure_future(self._read(endpoint))
            task.add_done_callback(lambda task: self._on_read(endpoint, task))
        return task

    def _on_read(self, endpoint: Endpoint, task: asyncio.Task[None]) -> None:
        self._reading.pop(endpoint, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the models of endpoint %s could not be read", endpoint.url, exc_info=error)

    async def _read(self, endpoint: Endpoint) -> None:
        self._due_at[endpoint] = self._clock() + READ_S + RETRY_S
        status, body = 0, b""
        try:
            async with self._places, asyncio.timeout(READ_S):
                status, body = await fetch(self._pool.connections(endpoint), self._request, MAX_LISTING_BYTES)
        except TooLargeError as error:
            self._log_too_large(endpoint.url, "endpoint %s lists no models: %s", endpoint.url, error)
            status = 200
        except (UpstreamError, TimeoutError):
            pass
        if endpoint not in self._pool:
            self.forget(endpoint)
            return
        now = self._read_at[endpoint] = self._clock()
        if status in _UNSURE or ((status < 200 or status >= 500) and status != _NOT_IMPLEMENTED):
            self._due_at[endpoint] = now + RETRY_S
            return
        self._due_at[endpoint] = now + self._interval_s * self._rng.uniform(0.9, 1.1)
        if status in _DENIED:
            self._on_denied(endpoint, status)
            return
        self._denied.discard(endpoint)
        cards = read_listing(body) if status == 200 else {}
        before = self.directory.listing(endpoint)
        if before is None or before.keys() != cards.keys():
            log.info("endpoint %s serves %s", endpoint.url, _shown(list(cards), status))
        self.directory.learn(endpoint, cards)

    def _on_denied(self, endpoint: Endpoint, status: int) -> None:
        if endpoint in self._denied:
            return
        self._denied.add(endpoint)
        if endpoint.upstream.hosted:
            gets = "it gets requests for the models of its pool alone"
        elif self.directory.listing(endpoint) is None:
            gets = "it gets requests for models that nobody lists"
        else:
            gets = "what it listed before holds"
        log.warning(
            "endpoint %s denies the gateway its list of models (status %d), so %s: see %s",
            endpoint.url,
            status,
            gets,
            endpoint.upstream.key_source or "--endpoint-api-key",
        )


def _shown(names: Sequence[str], status: int) -> str:
    if not names:
        why = "it lists none" if status == 200 else f"its /v1/models answered with status {status}"
        return f"any model: {why}"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
