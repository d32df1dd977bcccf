"""The requests that Envoy was told where to send: picked here, ended by Envoy's access log, counted once."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from penstock.config.gateway import GatewayConfig
from penstock.gateway.extproc.access_log_entry import is_local_reply, transport_result_of
from penstock.gateway.extproc.messages import AccessLogEntry
from penstock.gateway.relay.attempt import ExpectedReply
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.request_record import RequestRecord, failure_reason
from penstock.gateway.requests.model_rewrites import ModelRewrites
from penstock.gateway.requests.trace_context import TracePropagator
from penstock.gateway.responses.outcome import ENDPOINT_FAULTS, Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import Observation, ReplyObserver, StreamObserver
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.picker import NoEndpointError, PickRequest
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.http.access_keys import Keys

log = logging.getLogger(__name__)

LOG_DELAY_S = 10.0
"""How much later than its end the access log may tell of a request; Envoy holds entries for a second."""
NAMESPACE = "envoy.lb"
"""Of the metadata in which picks are told."""
PROCESS_KEY = "penstock-gateway-process"
"""Metadata that says which process picked; Envoy's access log has it again."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request that Envoy was told where to send."""

    record: RequestRecord
    endpoints: list[Endpoint]
    """The first one was picked, the others are for retries."""
    tokens: int
    expects: ExpectedReply
    request_id: str
    picked_at: float
    served: str = ""
    """Address and port of the endpoint that answered, as Envoy says."""
    observer: StreamObserver | ReplyObserver | None = None
    """Of the reply, where Envoy sends it."""
    observing: bool = False
    """The reply is still being sent here."""
    observed_at: float | None = None
    """When the last of it was."""
    seen_status: int = 0
    in_flight: bool = True
    """The endpoint still works for it, as far as is known."""
    entry: AccessLogEntry | None = None
    """What the access log says."""

    @property
    def destinations(self) -> list[str]:
        return [endpoint.destination for endpoint in self.endpoints]


@dataclass(slots=True)
class RoutedRequests:
    """Of one gateway. ``relay`` lends its pool, picker, clock and limits."""

    relay: Relay
    recorder: RequestRecorder
    rewrites: ModelRewrites
    keys: Keys
    tracing: TracePropagator
    session_header: bytes
    max_request_bytes: int
    endpoint_api_key: str | None = None
    open_streams: int = 0
    """Those that are open: of requests that are coming in, and of replies where Envoy sends them."""
    open_log_streams: int = 0
    """Access log streams that are open."""
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Value of :data:`PROCESS_KEY`."""
    _pending: dict[str, list[RoutedRequest]] = field(default_factory=dict)
    """By request id, the oldest first; clients may send an id twice."""

    @classmethod
    def from_config(
        cls,
        config: GatewayConfig,
        relay: Relay,
        ledger: RequestRecorder,
        rewrites: ModelRewrites,
        tracing: TracePropagator,
    ) -> RoutedRequests:
        """With the options of ``config``."""
        return cls(
            relay,
            ledger,
            rewrites,
            Keys(config.api_key or ()),
            tracing,
            config.session_header.lower().encode(),
            config.max_request_bytes,
            config.endpoint_api_key,
        )

    @property
    def clock(self) -> Callable[[], float]:
        return self.relay.clock

    @property
    def ttft_slo_s(self) -> float | None:
        return self.relay.ttft_slo_s

    @property
    def is_busy(self) -> bool:
        """Whether there are exchanges that go on, or requests whose end the log may still tell."""
        return self.open_streams > 0 or (bool(self._pending) and self.open_log_streams > 0)

    # -- for exchanges

    def pick(
        self,
        request: PickRequest,
        request_id: str,
        subset: list[str] | None,
        record: RequestRecord,
        expects: ExpectedReply,
    ) -> RoutedRequest:
        """Where to send a request; ``subset`` are the addresses that Envoy allows. Raises Refusal."""
        began, now = perf_counter(), self.clock()
        endpoints = [endpoint for endpoint in self.relay.pool.endpoints if endpoint.destination]
        if subset is not None:
            request.subset = frozenset(each.url for each in endpoints if each.destination in subset)
        if not endpoints:
            raise NoEndpointError(503, "none_ready", "No model server has an address.")
        ranked = self.relay.picker.ranked(request, endpoints, now, self.relay.retry_policy.max_attempts)
        record.pick_s = perf_counter() - began
        pick = RoutedRequest(record, ranked, request.tokens, expects, request_id, now)
        ranked[0].request_sent(request.tokens, now)
        self._pending.setdefault(request_id, []).append(pick)
        return pick

    def find_unobserved(self, request_id: str) -> RoutedRequest | None:
        """The oldest pending pick for the id whose reply nobody observes."""
        picks = self._pending.get(request_id, ())
        return next((pick for pick in picks if pick.observer is None), None)

    def observation_ended(self, pick: RoutedRequest) -> None:
        """No more of its reply will come."""
        pick.observing, pick.observed_at = False, self.clock()
        self._release_endpoint(pick)
        if pick.entry is not None:
            self._finish_with_log(pick)

    def finish(self, record: RequestRecord) -> None:
        """The request has ended; count it."""
        record.ended_at = record.ended_at or self.clock()
        self.recorder.finish(record)

    # -- the access log

    def on_log_entry(self, entry: AccessLogEntry) -> None:
        """Envoy's log says that a request has ended. One that another process picked for is counted as
        well; one that nobody picked for, or that has been counted without the log, is not."""
        picked_by = entry.metadata.get(NAMESPACE, {}).get(PROCESS_KEY)
        waiting = [pick for pick in self._pending.get(entry.request_id, ()) if pick.entry is None]
        if waiting:
            waiting[0].entry = entry
            self._release_endpoint(waiting[0])
            if not waiting[0].observing:
                self._finish_with_log(waiting[0])
        elif picked_by is not None and picked_by != [self.process]:
            record = RequestRecord(entry.path, entry.request_id, began_at=self.clock() - entry.duration_s)
            self._record_log_entry(record, entry, Observation())

    def expire(self) -> None:
        """Give up on requests of which the log has not told; called now and then. Where the reply was seen,
        that is all there is to know."""
        now, longest = self.clock(), self.relay.timeouts.total
        for pick in [pick for picks in self._pending.values() for pick in picks if not pick.observing]:
            if pick.observed_at is not None and pick.observer is not None:
                if now - pick.observed_at > LOG_DELAY_S:
                    ending = TransportResult.COMPLETE if pick.observer.seen.ended else TransportResult.BROKEN
                    self._finish_without_log(pick, ending, "the reply is not whole")
            elif now - pick.record.began_at > longest + LOG_DELAY_S:
                self._finish_without_log(
                    pick, TransportResult.TIMEOUT, "Envoy's access log has not told of its end"
                )

    # -- the end

    def _finish_with_log(self, pick: RoutedRequest) -> None:
        """The log has told of its end, and its reply has been seen as far as it came."""
        entry, record = pick.entry, pick.record
        assert entry is not None, "a request is settled by the log"
        seen = Observation()
        if pick.observer is not None:
            seen = pick.observer.seen
        self._remove(pick)
        self._record_log_entry(record, entry, seen, observed=pick.observer is not None)
        self._update_breakers(pick, entry, record.outcome)

    def _record_log_entry(
        self, record: RequestRecord, entry: AccessLogEntry, seen: Observation, *, observed: bool = False
    ) -> None:
        """Name the outcome and count the request."""
        ending, record.reason = transport_result_of(entry)
        if not observed:
            seen.ended = ending is TransportResult.COMPLETE
        record.seen, record.status, record.attempts = seen, entry.status, max(1, entry.attempts)
        record.bytes_in, record.bytes_out = entry.bytes_in or record.bytes_in, entry.bytes_out
        record.endpoint = self._url(entry.upstream) or record.endpoint
        if is_local_reply(entry) and ending is TransportResult.COMPLETE:
            record.outcome, record.reason = Outcome.REJECTED, "envoy"
        else:
            record.outcome = classify_outcome(ending, entry.status or None, seen, record.path)
            record.reason = record.reason or failure_reason(record)
        record.ended_at = record.began_at + entry.duration_s
        self.finish(record)

    def _update_breakers(self, pick: RoutedRequest, entry: AccessLogEntry, outcome: Outcome) -> None:
        """Those that were tried in vain have failed; the one that answered last is judged by the outcome.

        Where the reply is not seen, the time to its first byte stands in for that to its first token.
        """
        now = self.clock()
        upstream = pick.served or entry.upstream
        served = next((row for row, each in enumerate(pick.endpoints) if each.destination == upstream), 0)
        tried = pick.endpoints[: served + 1] if entry.attempts > 1 else [pick.endpoints[served]]
        for endpoint in tried[:-1]:
            endpoint.breaker.record_failure(now, pick.picked_at)
        if outcome is Outcome.REJECTED:
            tried[-1].breaker.release_probe()
            return
        tried[-1].breaker.record_outcome(outcome, now, pick.picked_at)
        first = pick.record.seen.first_token_at
        if first is not None:
            tried[-1].add_ttft(first - pick.record.began_at)
        elif entry.first_byte_s is not None and outcome not in ENDPOINT_FAULTS:
            tried[-1].add_ttft(entry.first_byte_s)

    def _finish_without_log(self, pick: RoutedRequest, ending: TransportResult, reason: str) -> None:
        """Without the log."""
        record = pick.record
        self._remove(pick)
        if pick.observer is not None:
            record.seen, record.status = pick.observer.seen, pick.seen_status
        record.endpoint = self._url(pick.served) or pick.endpoints[0].url
        record.attempts = 1
        record.outcome = classify_outcome(ending, record.status or None, record.seen, record.path)
        record.reason = reason if ending is not TransportResult.COMPLETE else failure_reason(record)
        if pick.observer is None:
            pick.endpoints[0].breaker.release_probe()
        else:
            pick.endpoints[0].breaker.record_outcome(record.outcome, self.clock(), pick.picked_at)
        self.finish(record)

    def _remove(self, pick: RoutedRequest) -> None:
        picks = self._pending[pick.request_id]
        picks.remove(pick)
        if not picks:
            del self._pending[pick.request_id]
        self._release_endpoint(pick)

    def _release_endpoint(self, pick: RoutedRequest) -> None:
        """The endpoint is done with it; the log may still have to say how."""
        if pick.in_flight:
            pick.in_flight = False
            pick.endpoints[0].request_ended(pick.tokens)
            self.recorder.metrics.release(pick.record)

    def _url(self, destination: str) -> str:
        endpoints = self.relay.pool.endpoints
        return next((each.url for each in endpoints if each.destination == destination), destination)
