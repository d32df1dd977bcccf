"""The requests that were routed for Envoy: picked here, ended by Envoy's access log, counted once."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from time import perf_counter

from penstock.gateway.extproc.access_log_entry import is_local_reply, transport_result_of
from penstock.gateway.extproc.messages import AccessLogEntry
from penstock.gateway.relay.attempt import ExpectedReply
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.request_record import RequestRecord, failure_reason
from penstock.gateway.requests.model_rewrites import ModelRewrites
from penstock.gateway.responses.outcome import ENDPOINT_FAULTS, Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import Observation, ReplyObserver, StreamObserver
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.picker import NoEndpointError, PickRequest
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.http.access_keys import Keys
from penstock.telemetry.trace_context import TracePropagator

LOG_DELAY_S = 10.0
"""Time after the end of a request when its access log entry counts as lost; Envoy buffers entries for 1 s."""
NAMESPACE = "envoy.lb"
"""Namespace of the metadata that carries routing decisions."""
PROCESS_KEY = "penstock-gateway-process"
"""Metadata key of the gateway process that picked; Envoy's access log repeats it."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request whose endpoint was picked and sent to Envoy."""

    record: RequestRecord
    endpoints: list[Endpoint]
    """The picked one first; Envoy retries at the others."""
    tokens: int
    expects: ExpectedReply
    request_id: str
    picked_at: float
    served: str = ""
    """Address and port of the endpoint that answered, reported by Envoy."""
    observer: StreamObserver | ReplyObserver | None = None
    """Observes the reply, if Envoy sends replies here."""
    observing: bool = False
    """Envoy is still sending the reply here."""
    observed_at: float | None = None
    """When the last part of the reply came."""
    seen_status: int = 0
    in_flight: bool = True
    """It counts as in flight at its endpoint."""
    entry: AccessLogEntry | None = None
    """Its entry in the access log."""

    @property
    def destinations(self) -> list[str]:
        return [endpoint.destination for endpoint in self.endpoints]


@dataclass(slots=True)
class RoutedRequests:
    """The routed requests of one gateway process; uses pool, picker, clock and limits of ``relay``."""

    relay: Relay
    recorder: RequestRecorder
    rewrites: ModelRewrites
    keys: Keys
    tracing: TracePropagator
    session_header: bytes
    max_request_bytes: int
    endpoint_api_key: str | None = None
    open_streams: int = 0
    """Open streams of external processing."""
    open_log_streams: int = 0
    """Open streams of the access log."""
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Value of :data:`PROCESS_KEY`."""
    _pending: dict[str, list[RoutedRequest]] = field(default_factory=dict)
    """By request id, the oldest first; clients may send an id twice."""

    @property
    def is_busy(self) -> bool:
        """Whether streams are open, or the access log may still report the end of requests."""
        return self.open_streams > 0 or (bool(self._pending) and self.open_log_streams > 0)

    # -- for streams of external processing

    def pick(
        self,
        request: PickRequest,
        request_id: str,
        *,
        subset: list[str] | None,
        record: RequestRecord,
        expects: ExpectedReply,
    ) -> RoutedRequest:
        """Pick endpoints for a request, among the addresses in ``subset`` if Envoy names some. Raises
        NoEndpointError."""
        started, now = perf_counter(), self.relay.clock()
        endpoints = [endpoint for endpoint in self.relay.pool.endpoints if endpoint.destination]
        if subset is not None:
            request.subset = frozenset(each.url for each in endpoints if each.destination in subset)
        if not endpoints:
            raise NoEndpointError(503, "none_ready", "No model server has an address.")
        ranked = self.relay.picker.ranked(request, endpoints, now, self.relay.retry_policy.max_attempts)
        record.pick_s = perf_counter() - started
        routed = RoutedRequest(
            record=record,
            endpoints=ranked,
            tokens=request.tokens,
            expects=expects,
            request_id=request_id,
            picked_at=now,
        )
        ranked[0].request_sent(request.tokens, now)
        self._pending.setdefault(request_id, []).append(routed)
        return routed

    def find_unobserved(self, request_id: str) -> RoutedRequest | None:
        """The oldest pending request with this id whose reply is not observed."""
        pending = self._pending.get(request_id, ())
        return next((routed for routed in pending if routed.observer is None), None)

    def learn_response(self, id: str, routed: RoutedRequest) -> None:
        """The endpoint that answers has this response."""
        served = routed.served or routed.destinations[0]
        for endpoint in routed.endpoints:
            if endpoint.destination == served:
                self.relay.owners.learn(id, endpoint)

    def observation_ended(self, routed: RoutedRequest) -> None:
        """No more of the reply will come."""
        routed.observing, routed.observed_at = False, self.relay.clock()
        self._release_endpoint(routed)
        if routed.entry is not None:
            self._finish_with_log(routed)

    def finish(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        record.ended_at = record.ended_at or self.relay.clock()
        self.recorder.finish(record)

    # -- the access log

    def on_log_entry(self, entry: AccessLogEntry) -> None:
        """Envoy reports the end of a request. It is counted if this process or another gateway process has
        picked its endpoint, and if it was not counted without the log before."""
        picked_by = entry.metadata.get(NAMESPACE, {}).get(PROCESS_KEY)
        waiting = [routed for routed in self._pending.get(entry.request_id, ()) if routed.entry is None]
        if waiting:
            waiting[0].entry = entry
            self._release_endpoint(waiting[0])
            if not waiting[0].observing:
                self._finish_with_log(waiting[0])
        elif picked_by is not None and picked_by != [self.process]:
            record = RequestRecord(
                entry.path, entry.request_id, began_at=self.relay.clock() - entry.duration_s
            )
            self._record_log_entry(record, entry, Observation())

    def expire(self) -> None:
        """Count requests whose log entry is overdue, by their observed reply if there is one. Called several
        times a second."""
        now, longest = self.relay.clock(), self.relay.timeouts.total
        for routed in [
            routed for pending in self._pending.values() for routed in pending if not routed.observing
        ]:
            if routed.observed_at is not None and routed.observer is not None:
                if now - routed.observed_at > LOG_DELAY_S:
                    ending = (
                        TransportResult.COMPLETE if routed.observer.seen.ended else TransportResult.BROKEN
                    )
                    self._finish_without_log(routed, ending, "the reply is incomplete")
            elif now - routed.record.began_at > longest + LOG_DELAY_S:
                self._finish_without_log(
                    routed, TransportResult.TIMEOUT, "Envoy's access log has no entry for it"
                )

    # -- the end

    def _finish_with_log(self, routed: RoutedRequest) -> None:
        """Count a request by its log entry and its observed reply; no more of either will come."""
        entry, record = routed.entry, routed.record
        assert entry is not None, "the log entry has come"
        seen = Observation() if routed.observer is None else routed.observer.seen
        self._remove(routed)
        self._record_log_entry(record, entry, seen, observed=routed.observer is not None)
        self._update_breakers(routed, entry, record.outcome)

    def _record_log_entry(
        self, record: RequestRecord, entry: AccessLogEntry, seen: Observation, *, observed: bool = False
    ) -> None:
        """Set the outcome and count the request."""
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

    def _update_breakers(self, routed: RoutedRequest, entry: AccessLogEntry, outcome: Outcome) -> None:
        """Record failures of the endpoints that Envoy tried in vain, and the outcome at the last one.

        For an unobserved reply, the time to its first byte stands in for the time to its first token.
        """
        now, client = self.relay.clock(), routed.record.client
        upstream = routed.served or entry.upstream
        served = next((row for row, each in enumerate(routed.endpoints) if each.destination == upstream), 0)
        tried = routed.endpoints[: served + 1] if entry.attempts > 1 else [routed.endpoints[served]]
        for endpoint in tried[:-1]:
            endpoint.breaker.record_error(now, routed.picked_at, client)  # or a fault: Envoy does not say
        if outcome is Outcome.REJECTED:
            tried[-1].breaker.release_probe()
            return
        tried[-1].breaker.record_outcome(outcome, now, routed.picked_at, client)
        first = routed.record.seen.first_token_at
        if first is not None:
            tried[-1].add_ttft(first - routed.record.began_at)
        elif entry.first_byte_s is not None and outcome not in ENDPOINT_FAULTS:
            tried[-1].add_ttft(entry.first_byte_s)

    def _finish_without_log(self, routed: RoutedRequest, ending: TransportResult, reason: str) -> None:
        """Count a request whose log entry is missing."""
        record = routed.record
        self._remove(routed)
        if routed.observer is not None:
            record.seen, record.status = routed.observer.seen, routed.seen_status
        record.endpoint = self._url(routed.served) or routed.endpoints[0].url
        record.attempts = 1
        record.outcome = classify_outcome(ending, record.status or None, record.seen, record.path)
        record.reason = reason if ending is not TransportResult.COMPLETE else failure_reason(record)
        if routed.observer is None:
            routed.endpoints[0].breaker.release_probe()
        else:
            routed.endpoints[0].breaker.record_outcome(
                record.outcome, self.relay.clock(), routed.picked_at, record.client
            )
        self.finish(record)

    def _remove(self, routed: RoutedRequest) -> None:
        pending = self._pending[routed.request_id]
        pending.remove(routed)
        if not pending:
            del self._pending[routed.request_id]
        self._release_endpoint(routed)

    def _release_endpoint(self, routed: RoutedRequest) -> None:
        """The endpoint has finished the request; the log entry with its outcome may come later."""
        if routed.in_flight:
            routed.in_flight = False
            routed.endpoints[0].request_ended(routed.tokens)
            self.recorder.metrics.release(routed.record)

    def _url(self, destination: str) -> str:
        endpoints = self.relay.pool.endpoints
        return next((each.url for each in endpoints if each.destination == destination), destination)
