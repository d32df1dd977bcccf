"""Decides which endpoint gets a request: of the gateway's own clients, and of Envoy's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.flow_control import HaveFree
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.cached_prompts import CachedPrompts
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_capacity import CandidateCapacity, EndpointCapacity
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.model_steps import FallbackChain, FallbackStep
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest, pick_request
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.remote_prefill import RemotePrefill
from penstock.gateway.routing.response_owners import ResponseOwners
from penstock.gateway.routing.response_search import ResponseSearch

Picked = TypeVar("Picked")


@dataclass(slots=True)
class Router:
    """The decision, for all requests of a gateway. ``clock`` gives seconds.

    A request is prepared once, then picked for once or several times, and finished once.
    """

    pool: EndpointPool
    models: FallbackChain
    picker: Picker
    clock: Callable[[], float]
    admission: Admission
    ttft_slo_s: float | None = None
    capacity: EndpointCapacity = field(default_factory=EndpointCapacity)
    caches: CachedPrompts | None = None
    """What is known exactly of prefix caches; None: nothing is."""
    prefill: RemotePrefill | None = None
    """None: endpoints compute the prompts that they answer."""
    owners: ResponseOwners = field(default_factory=ResponseOwners)
    search: ResponseSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = ResponseSearch(self.pool, self.owners)

    async def prepare(
        self,
        incoming: IncomingRequest,
        record: RequestRecord,
        gone: asyncio.Future[None] | None = None,
        owners: Sequence[Endpoint] | None = None,
    ) -> PickRequest:
        """Everything between a complete request and a pick that may wait, or refuse it. ``gone`` is done when
        the client disconnects; None: the call is cancelled then. ``owners`` have the response that it
        continues; None: they are looked for. Raises ApiError, NoEndpointError."""
        body = incoming.body
        session = incoming.session or (None if body is None else body.session)
        if owners is None and incoming.response is not None:
            owners = await self._owners(incoming, incoming.response)
        steps: Sequence[FallbackStep]
        if incoming.model is None:
            steps = (self.models.any_model,)
        elif owners is not None:
            steps = (self.models.step_at(owners, incoming.model, session),)
        else:
            steps = await self.models.find_steps(incoming.model, session)
        request = pick_request(incoming, session, steps, self.ttft_slo_s)
        request.client, request.priority = record.client, record.priority
        request.owners, request.record = owners, record
        record.target_model = bounded_name(request.steps[0].model)
        if incoming.subset is not None:
            request.subset = frozenset(
                each.url for each in self.pool.endpoints if incoming.allows(each.destination)
            )
        self._begin_step(request)
        assert request.incoming is not None, "it was made of one"
        permit = self.admission.permit(request.incoming, record)
        if permit is not None and permit.must_enter:
            candidates = partial(self._candidates, request)
            await self.admission.enter(permit, record, candidates, gone)
        request.permit = permit
        if incoming.model is not None:
            self.models.copy(incoming.model, session, request)
        looks_ahead = self.caches is not None or (self.prefill is not None and self.prefill.applies)
        if body is not None and incoming.rest is None and owners is None and looks_ahead:
            try:
                await self._look_ahead(request, gone)
            except BaseException:  # the call is cancelled
                self.finish(request, record)
                raise
        return request

    def _begin_step(self, request: PickRequest) -> None:
        """Go on with the step that takes the request now, and the endpoints that answer."""
        if self.prefill is not None:
            request.subset = self.prefill.restrict(request.subset)
        self._leave_failing(request)
        if request.steps[0].overflow is not None:
            self._overflow(request)

    def preview(self, request: PickRequest, most: int) -> list[Endpoint]:
        """The endpoint that a request of this moment would be sent to, and those for retries, at most
        ``most`` in all. The request goes on to the step that takes it; nothing else changes, nobody is asked.
        Raises NoEndpointError."""
        self._begin_step(request)
        now = self.clock()
        try:
            return self._previewed(request, most, now)
        except NoEndpointError:
            if not self.fall_back(request, now):
                raise
            return self._previewed(request, most, now)

    def _previewed(self, request: PickRequest, most: int, now: float) -> list[Endpoint]:
        endpoints, free = request.steps[0].endpoints, self.capacity.peek
        ranked = self.picker.ranked(request, endpoints, now, most)
        if self.admission.flow is not None and request.owners is None and free(ranked[0], now) <= 0:
            places = self._with_places(request, endpoints, now, free)
            ranked = self.picker.ranked(request, places, now, most)
        return ranked

    async def _look_ahead(self, request: PickRequest, gone: asyncio.Future[None] | None) -> None:
        """Find out where the prompt is cached, and have it computed where that pays."""
        if self.caches is not None:
            await self._look_up_prompt(self.caches, request)
        if self.prefill is not None:
            await self.prefill.compute_prompt(request, gone)

    async def _look_up_prompt(self, caches: CachedPrompts, request: PickRequest) -> None:
        """Find out where the prompt is cached. An endpoint that was sent its beginning is asked first."""
        now, incoming = self.clock(), request.incoming
        assert incoming is not None, "it has been prepared"
        ready = [
            endpoint
            for endpoint in request.steps[0].endpoints
            if endpoint.is_ready(now) and incoming.allows(endpoint.destination)
        ]
        matched = dict(zip(ready, self.picker.index.matched(request.blocks, ready), strict=True))
        ready.sort(key=lambda endpoint: (-matched[endpoint], endpoint.in_flight))
        request.prompt = await caches.find_cached(incoming, ready, now)

    async def _owners(self, incoming: IncomingRequest, id: str) -> Sequence[Endpoint] | None:
        """The endpoints that have the stored response ``id``. Raises ApiError."""
        return await self.search.find_owner(
            id, incoming.headers, self.clock(), previous=incoming.body is not None
        )

    def _candidates(self, request: PickRequest) -> tuple[Hashable, HaveFree]:
        """The endpoints that may get the request, for flow control: their name, and whether they have free
        places."""
        subset, step, owners = request.subset, request.steps[0], request.owners
        known = step.endpoints if owners is None else owners
        key = _gate_key(request, step) if owners is None else (subset, tuple(owners))

        def endpoints() -> Iterator[Endpoint]:
            return (each for each in known if subset is None or each.url in subset)

        return key, CandidateCapacity(self.capacity, endpoints).have_free

    def pick(self, request: PickRequest) -> Endpoint:
        """The endpoint to send a prepared request to. If its step has none, the next one is taken that has.
        Raises NoEndpointError."""
        return self._picked(request, self._pick)

    def ranked(self, request: PickRequest, most: int) -> list[Endpoint]:
        """The endpoint to send a prepared request to, and those for retries, at most ``most`` in all; only
        endpoints whose address is known. Raises NoEndpointError."""
        return self._picked(request, lambda request: self._rank(request, most))

    def _picked(self, request: PickRequest, pick: Callable[[PickRequest], Picked]) -> Picked:
        self._leave_failing(request)
        try:
            picked = pick(request)
        except NoEndpointError:
            if not self.fall_back(request, self.clock()):
                raise
            picked = pick(request)
        self._sent(request)
        return picked

    def _pick(self, request: PickRequest) -> Endpoint:
        return self._ranked(request, request.steps[0].endpoints, 1)[0]

    def _rank(self, request: PickRequest, most: int) -> list[Endpoint]:
        endpoints: Sequence[Endpoint] = request.steps[0].endpoints
        if not all(each.destination for each in endpoints):  # the picker knows the list of the step
            endpoints = [each for each in endpoints if each.destination]
        if not endpoints:
            raise NoEndpointError(503, "none_ready", "No model server has an address.")
        return self._ranked(request, endpoints, most)

    def _ranked(self, request: PickRequest, endpoints: Sequence[Endpoint], most: int) -> list[Endpoint]:
        """With flow control an endpoint that is full gets the request only if all are."""
        now = self.clock()
        flow = None if request.permit is None or request.owners is not None else request.permit.flow
        if flow is None or not flow.queued_s:
            ranked = self.picker.ranked(request, endpoints, now, most)
        if flow is not None and (flow.queued_s or self.capacity.free(ranked[0], now) <= 0):
            ranked = self.picker.ranked(
                request, self._with_places(request, endpoints, now, self.capacity.free), now, most
            )
        self.picker.remember(request, ranked[0])
        if self.caches is not None and request.prompt is not None:
            self.caches.expect(request.prompt, ranked[0], now)
        if request.transfer is not None and ranked[0].role == "decode":
            return ranked[:1]  # Envoy would send the others the same body
        return ranked

    # -- other models and pools

    def has_candidate(self, request: PickRequest, now: float) -> bool:
        """Whether the step of the request has an endpoint that it was not sent to."""
        return self.picker.has_candidate(request, request.steps[0].endpoints, now)

    def next_step(self, request: PickRequest, now: float) -> int | None:
        """Index of the next step that has an endpoint; None: there is none."""
        if len(request.steps) < 2:
            return None
        untried = replace(request, tried=set())
        return next(
            (
                index
                for index, step in enumerate(request.steps[1:], 1)
                if self.picker.has_candidate(untried, step.endpoints, now)
            ),
            None,
        )

    def fall_back(self, request: PickRequest, now: float) -> bool:
        """Go on with the next step that has an endpoint; returns whether there is one."""
        index = self.next_step(request, now)
        if index is None:
            return False
        self._take_step(request, index)
        return True

    def _take_step(self, request: PickRequest, index: int) -> None:
        request.take_step(index)
        if (record := request.record) is not None:
            record.target_model, record.fell_back = bounded_name(request.steps[0].model), True

    def _leave_failing(self, request: PickRequest) -> None:
        """Go on with the first step that has a working endpoint. Without any, failing ones may do, those of
        the step that holds first."""
        if len(request.steps) < 2 or self._works(request, request.steps[0], request.tried):
            return
        for index, step in enumerate(request.steps[1:], 1):
            if self._works(request, step, frozenset()):
                self._take_step(request, index)
                return

    def _overflow(self, request: PickRequest) -> None:
        """Have another step take a request that would wait for long, the first one where it would not. If
        that one refuses, the request may still wait."""
        if request.owners is not None or not self.has_queue(request, request.steps[0]):
            return
        for index, step in enumerate(request.steps[1:], 1):
            if self._works(request, step, frozenset()) and not self.has_queue(request, step):
                request.steps = (*request.steps[index:], *request.steps[:index])
                self._take_step(request, 0)
                return

    def has_queue(self, request: PickRequest, step: FallbackStep) -> bool:
        """Whether more requests wait for each endpoint of a step than its pool wants to."""
        if step.overflow is None:
            return False
        now, working = self.clock(), [*self._working(request, step, frozenset())]
        queued = self.admission.queued(_gate_key(request, step)) / max(len(working), 1)
        return all(each.waiting(now) + queued > step.overflow for each in working)

    def _works(self, request: PickRequest, step: FallbackStep, tried: Set[Endpoint]) -> bool:
        return any(True for _ in self._working(request, step, tried))

    def _working(self, request: PickRequest, step: FallbackStep, tried: Set[Endpoint]) -> Iterator[Endpoint]:
        now, subset = self.clock(), request.subset
        return (
            each
            for each in step.endpoints
            if each.breaker.allows(now)
            and not (each.is_away or each.is_withheld)
            and each not in tried
            and (subset is None or each.url in subset)
        )

    def on_not_found(self, request: PickRequest, endpoint: Endpoint) -> bool:
        """The endpoint did not know the model. Returns whether the request may go to another one that lists
        it, where this one may not have it any more."""
        if request.incoming is None or request.incoming.model is None or request.owners is not None:
            return False
        self.models.on_unknown_model(endpoint)
        listed = [each for each in request.steps[0].listed if each is not endpoint]
        return bool(listed) and self.picker.has_candidate(request, listed, self.clock())

    def _with_places(
        self,
        request: PickRequest,
        endpoints: Sequence[Endpoint],
        now: float,
        free: Callable[[Endpoint, float], int],
    ) -> Sequence[Endpoint]:
        """The ``endpoints`` that are not full; all if all are."""
        tried, subset = request.tried, request.subset
        usable = [each for each in endpoints if not each.removed and free(each, now) > 0]
        allowed = (each for each in usable if each not in tried and (subset is None or each.url in subset))
        return usable if any(each.is_ready(now) for each in allowed) else endpoints

    def _sent(self, request: PickRequest) -> None:
        """The caller counts it at its endpoint, before anything else runs."""
        if request.permit is not None:
            self.admission.sent(request.permit)

    def least_backoff_s(self, request: PickRequest) -> float:
        """Seconds until the first endpoint that wants no requests of this client takes some again; 0: none
        wants none."""
        return self.picker.least_backoff_s(request, request.steps[0].endpoints, self.clock())

    def finish(self, request: PickRequest, record: RequestRecord) -> None:
        """A prepared request has ended, or has been refused; ``record`` has what is known of it. Once."""
        if request.permit is not None:
            self.admission.finish(request.permit, record)

    def lose(self, request: PickRequest) -> None:
        """Whether a request still runs is not known: it holds nothing any more. It is finished as well."""
        if request.permit is not None:
            self.admission.lose(request.permit)

    def stop(self) -> int:
        """Refuse the requests that wait, as the gateway ends; returns how many there were."""
        return self.admission.stop()

    async def close(self) -> None:
        await self.admission.close()

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left the pool."""
        self.picker.forget(endpoint)
        self.models.forget(endpoint)
        self.owners.forget(endpoint)
        self.capacity.forget(endpoint)
        if self.caches is not None:
            self.caches.forget(endpoint)


def _gate_key(request: PickRequest, step: FallbackStep) -> Hashable:
    """By what flow control knows the endpoints of a step."""
    return request.subset, (bounded_name(step.model), step.pools)
