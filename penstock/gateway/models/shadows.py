"""Copies of requests for another model or pool, whose replies are discarded.

Clients never wait for them, and pay nothing: copies go to endpoints whose circuit breakers are closed and say
nothing to them, have an affinity of their own, and are left out when too many are under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from penstock.gateway.metric_definitions import SHADOWS, Figure
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.requests.apis import APIS
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.responses.expected_reply import expected_reply, make_observer
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import Observation, ReplyObserver, StreamObserver
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest, pick_request
from penstock.gateway.routing.picker import Picker
from penstock.gateway.upstream.exchange import Exchange, Failure, Headers, UpstreamError, UpstreamRequest

log = logging.getLogger(__name__)

COPIED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages"})
"""What these generate is stored nowhere."""
MAX_RUNNING = 64
"""Copies under way."""
MAX_BODY = 1 << 20
"""Bytes of a request that is copied."""
MAX_HELD = 16 << 20
"""Bytes of replies that are held to be read, of all copies together."""
MAX_REPLY = 16 << 20
"""Bytes of one reply; a longer one is cut."""
SKIPPED = "skipped"
"""The outcome of a copy that was not sent: too many, too large, or no endpoint was ready."""
HEADER = (b"x-penstock-shadow", b"1")


class Shadows:
    """The copies of one gateway. ``clock`` gives seconds."""

    def __init__(
        self,
        pool: EndpointPool,
        directory: ModelDirectory,
        picker: Picker,
        clock: Callable[[], float],
    ) -> None:
        """``picker`` is theirs alone."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """Number of copies by model or pool, as configured, and outcome."""
        self._pool = pool
        self._directory = directory
        self._picker = picker
        self._clock = clock
        self._running: set[asyncio.Task[None]] = set()
        self._held = HeldBytes(MAX_HELD)

    def copy(self, asked: str, session: str | None, request: PickRequest) -> None:
        """Send a copy of a request for the model ``asked`` if one is due. Does not wait."""
        shadow, incoming = shadow_of(self._directory, asked, request), request.incoming
        if shadow is None or incoming is None:
            return
        name, step = shadow
        large = incoming.rest is not None or bool(incoming.values) or incoming.size > MAX_BODY
        if step is None or len(self._running) >= MAX_RUNNING or large:
            self._counts[name, SKIPPED] += 1
            return
        task = asyncio.ensure_future(self._run(name, step, session, incoming))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def figures(self) -> Iterator[Figure]:
        """For metrics."""
        for (name, outcome), count in self._counts.items():
            yield Figure(SHADOWS, count, {"shadow": name, "outcome": outcome})

    def forget(self, endpoint: Endpoint) -> None:
        self._picker.forget(endpoint)

    async def _run(
        self, name: str, step: FallbackStep, session: str | None, incoming: IncomingRequest
    ) -> None:
        try:
            outcome = await self._outcome(step, session, incoming)
        except Exception:
            log.exception("a copy of a request for %s failed in the gateway", name)
            outcome = SKIPPED
        self._counts[name, outcome] += 1

    async def _outcome(self, step: FallbackStep, session: str | None, incoming: IncomingRequest) -> str:
        request = pick_request(incoming, session, (step,), None)
        api = APIS.get(incoming.path)  # copies are not translated
        endpoints = [
            each
            for each in step.endpoints
            if each.breaker.closed and each.role != "prefill" and (each.apis is None or api in each.apis)
        ]
        try:
            endpoint = self._picker.pick(request, endpoints, self._clock())
        except NoEndpointError:
            return SKIPPED
        assert request.incoming is not None, "it was made of one"
        endpoint.request_sent(request.tokens, self._clock())
        try:
            ending, status, seen = await self._send(endpoint, request.incoming)
        finally:
            endpoint.request_ended(request.tokens)
        return classify_outcome(ending, status, seen, incoming.path).value

    async def _send(
        self, endpoint: Endpoint, incoming: IncomingRequest
    ) -> tuple[TransportResult, int | None, Observation]:
        headers, timeouts = [*incoming.headers, HEADER], endpoint.upstream.timeouts
        reply: _DiscardedReply | None = None
        try:
            async with asyncio.timeout(timeouts.first_token + timeouts.event):
                exchange = await self._pool.connections(endpoint).acquire()
                reply = _DiscardedReply(exchange, incoming, self._held, self._clock)
                exchange.send(UpstreamRequest(b"POST", incoming.target, headers, incoming.raw), reply)
                ending = await reply.done
        except TimeoutError:
            ending = TransportResult.TIMEOUT
        except UpstreamError:
            ending = TransportResult.BROKEN
        finally:
            if reply is not None:
                reply.close()
        if reply is None:
            return ending, None, Observation()
        return ending, reply.status, reply.observer.seen


def shadow_of(
    directory: ModelDirectory, asked: str, request: PickRequest
) -> tuple[str, FallbackStep | None] | None:
    """The model or pool that a copy of the request is for, and where it goes; None: no copy is due. It does
    not go where the request goes itself."""
    incoming, own = request.incoming, request.steps[0]
    if incoming is None or incoming.path not in COPIED_PATHS or incoming.model is None:
        return None
    shadow = directory.shadow(asked, incoming.model)
    if shadow is None or (step := shadow[1]) is None:
        return shadow
    return None if (step.model, step.endpoints) == (own.model, own.endpoints) else shadow


class _DiscardedReply:
    """Receives a reply, to tell its outcome."""

    def __init__(
        self, exchange: Exchange, incoming: IncomingRequest, held: HeldBytes, clock: Callable[[], float]
    ) -> None:
        self.done: asyncio.Future[TransportResult] = asyncio.get_running_loop().create_future()
        self.status: int | None = None
        self.observer: StreamObserver | ReplyObserver = ReplyObserver(json=False)
        self._exchange = exchange
        self._expects = expected_reply(incoming.body, incoming.path)
        self._held = held
        self._clock = clock
        self._size = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.observer = make_observer(
            status,
            headers,
            self._expects,
            on_response=lambda id: None,
            strip_usage=False,
            held=self._held,
        )

    def on_body(self, data: bytes, now: float) -> None:
        self._size += len(data)
        if self._size > MAX_REPLY:
            self._exchange.abort()
            self._end(TransportResult.BROKEN)
        else:
            self.observer.feed(data, now)

    def on_end(self) -> None:
        self.observer.finish(self._clock())
        self._end(TransportResult.COMPLETE)

    def on_broken(self, reason: str, failure: Failure) -> None:
        failed = failure is Failure.SERVER
        self._end(TransportResult.SERVER_FAILED if failed else TransportResult.BROKEN)

    def close(self) -> None:
        """No more of it is read."""
        if not self.done.done():
            self._exchange.abort()
            self.done.cancel()
        self.observer.close()

    def _end(self, ending: TransportResult) -> None:
        if not self.done.done():
            self.done.set_result(ending)
