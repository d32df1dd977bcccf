"""Has the prompts of requests computed by endpoints that only prefill, for those that decode.

Long prompts delay the decodes of a server that computes both. So a request whose prompt is long, and not
cached where it will be decoded, goes to an endpoint with the role ``prefill`` first, for one token. What the
reply says is handed on to the one with the role ``decode``, which fetches the KV cache instead of computing
it. If anything fails, the latter computes the prompt itself, as it does with short ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from penstock.gateway.disaggregation.prefill_request import prefill_body, transfer_params
from penstock.gateway.metric_definitions import PREFILLS, Figure
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.routing.cached_prompts import CachedPrompts
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.upstream.exchange import UpstreamError, UpstreamRequest
from penstock.gateway.upstream.fetch import BrokenReplyError, fetch

log = logging.getLogger(__name__)

MIN_TOKENS = 512
"""Tokens of a prompt that are not cached, estimated, from which another endpoint computes it: fewer take less
time than their KV cache takes to arrive."""
MAX_ATTEMPTS = 2
"""Endpoints that are asked to prefill a prompt."""
MAX_REPLY_BYTES = 8 << 20
"""The ids of blocks of a prompt of a million tokens take 1 MB."""
RESULTS = ("handed_on", "shared", "failed")


class _Answer(Enum):
    DONE = 0
    REFUSED = 1
    """The prefill did not begin, or was answered with an error."""
    BROKEN = 2
    """The prefill may have begun. The prompt may have broken it, and is sent to no other endpoint that
    prefills."""


class DisaggregatedPrefill:
    """Prefills at other endpoints, for all requests of a gateway."""

    def __init__(
        self,
        pool: EndpointPool,
        picker: Picker,
        clock: Callable[[], float],
        *,
        min_tokens: int = MIN_TOKENS,
        timeout_s: float,
        caches: CachedPrompts | None = None,
    ) -> None:
        """``min_tokens``: of a prompt, that are not cached, from which another endpoint computes it.
        ``caches``: of the endpoints, as far as they are known; None: nothing is."""
        self._pool = pool
        self._picker = picker
        self._clock = clock
        self._min_tokens = min_tokens
        self._timeout_s = timeout_s
        self._caches = caches
        self._prefilling: frozenset[Endpoint] = frozenset()
        self._answering: frozenset[str] | None = None
        """URLs of the others; None: there are no others than those that answer."""
        self._results = Counter[str]()

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Follow these endpoints from now on."""
        endpoints = list(endpoints)
        self._prefilling = frozenset(each for each in endpoints if each.role == "prefill")
        self._answering = None
        if self._prefilling:
            self._answering = frozenset(each.url for each in endpoints if each not in self._prefilling)

    @property
    def applies(self) -> bool:
        """Whether there are endpoints that only compute prompts."""
        return self._answering is not None

    def figures(self) -> Iterator[Figure]:
        """For metrics."""
        for result in RESULTS:
            yield Figure(PREFILLS, self._results[result], {"result": result})

    def restrict(self, subset: frozenset[str] | None) -> frozenset[str] | None:
        """URLs of the endpoints of ``subset`` (None: of all) that answer requests; None: all do."""
        if self._answering is None or subset is None:
            return subset if self._answering is None else self._answering
        return subset & self._answering

    async def compute_prompt(self, request: PickRequest, gone: asyncio.Future[None] | None) -> None:
        """Have the prompt of a request computed, if that pays, and set ``request.transfer``.
        ``gone``: of the client; None: the call is cancelled then. Failures are none of the request's."""
        incoming = request.incoming
        if incoming is None or not self._prefilling or not self._is_worthwhile(request):
            return
        candidates = self._candidates(request, incoming)
        raw = None if incoming.values or not candidates else prefill_body(incoming.path, incoming.raw)
        if raw is None:
            return
        running = asyncio.ensure_future(self._prefill(request, incoming, raw, candidates))
        waited: set[asyncio.Future[Any]] = {running} if gone is None else {running, gone}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                request.transfer = running.result()
        finally:
            running.cancel()

    def _is_worthwhile(self, request: PickRequest) -> bool:
        """Whether an endpoint that decodes would have to compute much of the prompt."""
        decoding = [
            each
            for each in request.steps[0].endpoints
            if each.role == "decode" and (request.subset is None or each.url in request.subset)
        ]
        if not decoding or request.tokens < self._min_tokens:
            return False
        cached = self._picker.cached_share(request, decoding)
        return request.tokens * (1.0 - cached) >= self._min_tokens

    def _candidates(self, request: PickRequest, incoming: IncomingRequest) -> list[Endpoint]:
        """Endpoints that prefill for the model of the request, of those that Envoy allows."""
        return [
            each
            for each in request.steps[0].endpoints
            if each in self._prefilling and incoming.allows(each.destination)
        ]

    # -- the prefill

    async def _prefill(
        self, request: PickRequest, incoming: IncomingRequest, raw: bytes, candidates: list[Endpoint]
    ) -> bytes | None:
        """The parameters for the endpoint that decodes; None: it has to find the blocks in a store, or to
        compute the prompt itself."""
        asking = PickRequest(
            request.model,
            request.blocks,
            request.prompt,
            tokens=request.tokens,
            priority=max(request.priority, 0),
        )
        while len(asking.tried) < MAX_ATTEMPTS:
            try:
                endpoint = self._picker.pick(asking, candidates, self._clock())
            except NoEndpointError:
                break
            asking.tried.add(endpoint)
            if self._caches is not None and request.prompt is not None:
                self._caches.expect(request.prompt, endpoint, self._clock())
            answer, params = await self._ask(endpoint, request, incoming, raw)
            if answer is _Answer.BROKEN:
                break
            if answer is _Answer.DONE:
                if request.record is not None:
                    request.record.prefilled_by = endpoint.url
                self._results["shared" if params is None else "handed_on"] += 1
                return params
        self._results["failed"] += 1
        return None

    async def _ask(
        self, endpoint: Endpoint, request: PickRequest, incoming: IncomingRequest, raw: bytes
    ) -> tuple[_Answer, bytes | None]:
        """Have an endpoint prefill; returns whether it has, and the parameters that it gave."""
        sent_at, client = self._clock(), "" if request.record is None else request.record.client
        question = UpstreamRequest(b"POST", incoming.target, incoming.headers, raw)
        outcome, answer, params = Outcome.CLIENT_DISCONNECT, _Answer.REFUSED, None
        endpoint.request_sent(request.tokens, sent_at)
        try:
            async with asyncio.timeout(self._timeout_s):
                status, reply = await fetch(self._pool.connections(endpoint), question, MAX_REPLY_BYTES)
            if status == 200:
                params, answer, outcome = transfer_params(reply), _Answer.DONE, Outcome.OK
            else:
                log.debug("%s does not prefill: status %d", endpoint.url, status)
                outcome = Outcome.MODEL_SERVER_ERROR if status >= 500 else Outcome.CLIENT_ERROR
        except (BrokenReplyError, TimeoutError) as error:
            log.debug("%s has not prefilled: %s", endpoint.url, str(error) or "time-out")
            answer, outcome = _Answer.BROKEN, Outcome.NETWORK_ERROR
        except UpstreamError as error:
            log.debug("%s does not prefill: %s", endpoint.url, error)
            outcome = Outcome.NETWORK_ERROR
        except ValueError as error:
            log.debug("%s does not prefill: %s", endpoint.url, error)
            outcome = Outcome.CONTENT_ERROR
        finally:
            endpoint.request_ended(request.tokens)
            endpoint.breaker.record_outcome(outcome, self._clock(), sent_at, client)
        return answer, params
