"""The requests that were routed for Envoy: picked here, ended by Envoy's access log, counted once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from penstock.gateway.admission.intake import Intake
from penstock.gateway.extproc.access_log_entry import NO_CONNECTION, is_local_reply, transport_result_of
from penstock.gateway.extproc.messages import AccessLogEntry, Texts
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.retry_policy import AttemptProgress, progress_of
from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.responses.expected_reply import ExpectedReply
from penstock.gateway.responses.outcome import ENDPOINT_FAULTS, Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.request_record import RequestRecord, failure_reason
from penstock.gateway.responses.response_observer import Observation, ReplyObserver, StreamObserver
from penstock.gateway.routing.backoff import read_retry_after
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.upstream.exchange import Headers
from penstock.http.receive_budget import ReceiveBudget
from penstock.telemetry.trace_context import TracePropagator

LOG_DELAY_S = 10.0
"""Time after the end of a request when its access log entry counts as lost; Envoy buffers entries for 1 s."""
MAX_ATTEMPTS = 16
"""Endpoints that Envoy is given for one request, the most of --max-attempts."""
HELD_BYTES = 1 << 30
"""Bodies that are held altogether, by default."""
NAMESPACE = "envoy.lb"
"""Namespace of the metadata that carries routing decisions."""
PROCESS_KEY = "penstock-gateway-process"
"""Metadata key of the gateway process that picked; Envoy's access log repeats it."""
PICK_KEY = "penstock-gateway-pick"
"""Metadata key of one request's pick, ``PROCESS/NUMBER``, which the access log repeats as well.
Clients choose request ids, and may choose that of another request."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request whose endpoint was picked and sent to Envoy."""

    record: RequestRecord
    request: PickRequest
    endpoints: list[Endpoint]
    """The picked one first; Envoy retries at the others."""
    expects: ExpectedReply
    request_id: str
    pick: str
    """Value of :data:`PICK_KEY`."""
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
    """Whether the request counts as in flight at its endpoint."""
    is_open: bool = True
    """The request's stream of external processing is open, whose end tells something of the request's."""
    may_have_ended: bool = False
    """The request's entry in the access log may be lost."""
    entry: AccessLogEntry | None = None
    """The request's entry in the access log."""
    counted: bool = False
    """Whether the end of the request is counted."""
    unnamed: bool = False
    """Envoy may have left before it had the pick: then the entry has no metadata."""
    nameless: AccessLogEntry | None = None
    """The latest entry without metadata of a client that left; it is its own if it is ``unnamed``."""

    had_token: bool = False
    """The reply's first token has come."""
    backs_off: bool = False
    """The endpoint that answered has said when to come back."""

    @property
    def destinations(self) -> list[str]:
        return [endpoint.destination for endpoint in self.endpoints]

    @property
    def answering(self) -> Endpoint:
        """The endpoint that answered, as far as Envoy says, or the picked one."""
        served = self.served or (self.entry.upstream if self.entry is not None else "")
        return next((each for each in self.endpoints if each.destination == served), self.endpoints[0])


@dataclass(slots=True)
class RoutedRequests:
    """The routed requests of one gateway process; uses pool, picker, clock and limits of ``relay``."""

    relay: Relay
    recorder: RequestRecorder
    intake: Intake
    tracing: TracePropagator
    budget: ReceiveBudget = field(default_factory=lambda: ReceiveBudget(HELD_BYTES))
    """Bounds the bytes of bodies until their endpoints are picked."""
    open_streams: int = 0
    """Open streams of external processing."""
    open_log_streams: int = 0
    """Open streams of the access log."""
    log_streams_elsewhere: int = 0
    """Log streams of the other workers, which forward what concerns this one."""
    forward: Callable[[str, AccessLogEntry], bool] = lambda process, entry: False
    """Gives an entry to the process that picked, if it is another worker of this gateway; else False."""
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Value of :data:`PROCESS_KEY`."""
    _picks: int = 0
    _repeats_picks: bool = False
    """Envoy's access log repeats the metadata of picks: an entry without it is of no pick that Envoy has."""
    _logged_at: float = 0.0
    """When an entry came for a request that was picked here."""
    _pending: dict[str, list[RoutedRequest]] = field(default_factory=dict)
    """Pending requests by their id, the oldest first; clients may send an id twice."""

    @property
    def is_busy(self) -> bool:
        """Whether streams are open, or the access log may still report the end of requests."""
        log_streams = self.open_log_streams + self.log_streams_elsewhere
        return self.open_streams > 0 or (
            log_streams > 0
            and not all(each.may_have_ended for pending in self._pending.values() for each in pending)
        )

    @property
    def may_leave(self) -> bool:
        """Whether little is lost if this process ends while others go on: no stream is open, and no entry has
        come for a while. The others count requests that end later."""
        waited = self.relay.clock() - self._logged_at > LOG_DELAY_S
        return self.open_streams == 0 and (waited or not self._pending)

    # -- for streams of external processing

    def new_pick(self) -> str:
        """A value of :data:`PICK_KEY`."""
        self._picks += 1
        return f"{self.process}/{self._picks}"

    def pick(
        self,
        request: PickRequest,
        request_id: str,
        *,
        pick: str,
        record: RequestRecord,
        expects: ExpectedReply,
    ) -> RoutedRequest:
        """Pick endpoints for a prepared request. Raises NoEndpointError."""
        started, now = perf_counter(), self.relay.clock()
        ranked = self.relay.router.ranked(request, MAX_ATTEMPTS)
        upstream = ranked[0].upstream  # Envoy sends the same headers to all of them
        ranked = [each for each in ranked if each.upstream is upstream][: upstream.max_attempts]
        record.pick_s = perf_counter() - started
        routed = RoutedRequest(
            record=record,
            request=request,
            endpoints=ranked,
            expects=expects,
            request_id=request_id,
            pick=pick,
            picked_at=now,
        )
        record.pool = ranked[0].pool
        ranked[0].request_sent(request.tokens, now)
        self._pending.setdefault(request_id, []).append(routed)
        return routed

    def find_unobserved(self, request_id: str, metadata: dict[str, Texts]) -> RoutedRequest | None:
        """The pending request with this id, and the pick that the metadata name, whose reply is not observed;
        the oldest one if they name none."""
        return next((each for each in self._pending_of(request_id, metadata) if each.observer is None), None)

    def on_head(self, routed: RoutedRequest, status: int, headers: Headers) -> None:
        """The endpoint answers; it may say when to come back."""
        if progress_of(status, headers) is not AttemptProgress.REFUSED:
            return
        wait_s = read_retry_after(headers, time.time())
        if wait_s is not None:
            routed.backs_off = True
            request = routed.request
            routed.answering.refused(status, wait_s, request.client, request.model, self.relay.clock())

    def on_first_token(self, routed: RoutedRequest) -> None:
        """The endpoint works: its circuit breaker closes long before a long reply ends."""
        routed.had_token = True
        routed.answering.breaker.record_success(self.relay.clock(), routed.picked_at, routed.record.client)

    def learn_response(self, id: str, routed: RoutedRequest) -> None:
        """The endpoint that answers has this response."""
        if routed.served in ("", routed.answering.destination):
            self.relay.router.owners.learn(id, routed.answering)

    def observation_ended(self, routed: RoutedRequest) -> None:
        """No more of the reply will come."""
        routed.observing, routed.observed_at = False, self.relay.clock()
        self._release_endpoint(routed)
        if routed.entry is not None:
            self._finish_with_log(routed)

    def left_unnamed(self, routed: RoutedRequest) -> None:
        """The stream has ended, and Envoy may not have the name of the pick."""
        routed.unnamed = True
        if routed.nameless is not None and routed.entry is None and not routed.counted:
            self._on_own_entry(routed, routed.nameless)

    def finish(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        record.ended_at = record.ended_at or self.relay.clock()
        self.recorder.finish(record)

    # -- the access log

    def on_log_entry(self, entry: AccessLogEntry) -> None:
        """Envoy reports the end of a request. It is counted if this process or another gateway process has
        picked its endpoint, and if it was not counted without the log before."""
        reported = entry.metadata.get(NAMESPACE, {})
        picked_by, pick = reported.get(PROCESS_KEY), reported.get(PICK_KEY)
        process = [pick[0].rpartition("/")[0]] if pick else picked_by
        if process and process != [self.process] and self.forward(process[0], entry):
            return
        self._repeats_picks |= process is not None
        pending = self._pending_of(entry.request_id, entry.metadata)
        waiting = [routed for routed in pending if routed.entry is None]
        if process is None and self._repeats_picks:
            if transport_result_of(entry)[0] is not TransportResult.CLIENT_GONE:
                return  # refused by Envoy, or by this gateway
            for routed in waiting:
                routed.nameless = entry
            waiting = [routed for routed in waiting if routed.unnamed]
        if waiting:
            self._on_own_entry(waiting[0], entry)
        elif picked_by is not None and picked_by != [self.process]:
            record = RequestRecord(
                entry.path, entry.request_id, began_at=self.relay.clock() - entry.duration_s
            )
            self._record_log_entry(record, entry, Observation())

    def _on_own_entry(self, routed: RoutedRequest, entry: AccessLogEntry) -> None:
        routed.entry = entry
        self._logged_at = self.relay.clock()
        self._release_endpoint(routed)
        if not routed.observing:
            self._finish_with_log(routed)

    def on_entries_lost(self) -> None:
        """Entries of the access log are lost, of nobody knows which requests. Those that are not observed
        hold no places from here on, as they may have ended; what the endpoints run is in their scraped
        loads. An entry that comes still counts."""
        for pending in self._pending.values():
            for routed in pending:
                if routed.in_flight and not routed.is_open and routed.observer is None:
                    routed.may_have_ended = True
                    routed.endpoints[0].request_lost()
                    self._release_endpoint(routed)
                    self.relay.router.lose(routed.request)

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
        self.relay.router.finish(routed.request, record)
        self._update_breakers(routed, entry, record.outcome)

    def _record_log_entry(
        self, record: RequestRecord, entry: AccessLogEntry, seen: Observation, *, observed: bool = False
    ) -> None:
        """Set the outcome and count the request."""
        ending, record.reason = transport_result_of(entry)
        if not observed:
            seen.ended = ending is TransportResult.COMPLETE
        is_local = is_local_reply(entry)
        record.seen, record.status = seen, entry.status
        record.attempts = 0 if is_local else max(1, entry.attempts)
        record.bytes_in, record.bytes_out = entry.bytes_in or record.bytes_in, entry.bytes_out
        record.endpoint = self._url(entry.upstream) or record.endpoint
        complete = ending is TransportResult.COMPLETE
        answered_by = self._endpoint(entry.upstream) if complete and not is_local else None
        if answered_by is not None and self.relay.is_denied(answered_by, record.method, entry.status):
            ending, record.reason = TransportResult.DENIED, self.relay.denial(answered_by, entry.status)
        if is_local and complete:
            record.outcome, record.reason = Outcome.REJECTED, "envoy"
        else:
            record.outcome = classify_outcome(ending, entry.status or None, seen, record.path)
            record.reason = record.reason or failure_reason(record)
        record.ended_at = record.began_at + entry.duration_s
        self.finish(record)

    def _update_breakers(self, routed: RoutedRequest, entry: AccessLogEntry, outcome: Outcome) -> None:
        """Record failures of the endpoints that Envoy tried without success, and the outcome at the last one.

        For an unobserved reply with tokens, the time to its first byte stands in for the time to its first
        token.
        """
        now, sent_at, client = self.relay.clock(), routed.picked_at, routed.record.client
        last = routed.answering
        if entry.attempts > 1:
            for endpoint in routed.endpoints[: routed.endpoints.index(last)]:
                endpoint.breaker.record_failure(now, sent_at, client)  # Envoy does not say how it failed
        if outcome is Outcome.REJECTED:
            last.breaker.release_probe(sent_at)
            return
        if outcome in ENDPOINT_FAULTS:
            record = routed.record
            own_status = 0 if NO_CONNECTION in entry.flags else record.status  # else it is Envoy's
            last.note_failure(outcome, record.reason, own_status, record.request_id)
        if NO_CONNECTION in entry.flags:
            last.breaker.record_unavailable(now, sent_at)
        elif routed.backs_off:
            last.breaker.release_probe(sent_at)
        elif routed.record.status == 503:
            last.breaker.record_unavailable(now, sent_at, connected=True)
        else:
            last.breaker.record_outcome(outcome, now, sent_at, client, had_token=routed.had_token)
        if routed.record.is_replay or routed.record.path in VECTOR_APIS:
            return
        first = routed.record.seen.first_token_at
        if first is not None:
            last.add_ttft(first - routed.record.began_at)
        elif entry.first_byte_s is not None and outcome not in ENDPOINT_FAULTS:
            last.add_ttft(entry.first_byte_s)

    def _finish_without_log(self, routed: RoutedRequest, ending: TransportResult, reason: str) -> None:
        """Count a request whose log entry is missing."""
        record = routed.record
        self._remove(routed)
        if routed.observer is not None:
            record.seen, record.status = routed.observer.seen, routed.seen_status
        record.endpoint = self._url(routed.served) or routed.endpoints[0].url
        record.attempts = 1
        if self.relay.is_denied(routed.answering, record.method, record.status):
            ending, reason = TransportResult.DENIED, self.relay.denial(routed.answering, record.status)
        record.outcome = classify_outcome(ending, record.status or None, record.seen, record.path)
        record.reason = reason if ending is not TransportResult.COMPLETE else failure_reason(record)
        if routed.observer is None:
            routed.endpoints[0].breaker.release_probe(routed.picked_at)
        else:
            routed.endpoints[0].breaker.record_outcome(
                record.outcome,
                self.relay.clock(),
                routed.picked_at,
                record.client,
                had_token=routed.had_token,
            )
        self.finish(record)
        self.relay.router.finish(routed.request, record)

    def _pending_of(self, request_id: str, metadata: dict[str, Texts]) -> list[RoutedRequest]:
        """The pending requests with this id, and the pick that the metadata name, if they name one."""
        pick = metadata.get(NAMESPACE, {}).get(PICK_KEY)
        pending = self._pending.get(request_id, [])
        return [routed for routed in pending if pick is None or pick == [routed.pick]]

    def _remove(self, routed: RoutedRequest) -> None:
        routed.counted = True
        pending = self._pending[routed.request_id]
        pending.remove(routed)
        if not pending:
            del self._pending[routed.request_id]
        self._release_endpoint(routed)

    def _release_endpoint(self, routed: RoutedRequest) -> None:
        """The endpoint has finished the request; the log entry with its outcome may come later."""
        if routed.in_flight:
            routed.in_flight = False
            routed.endpoints[0].request_ended(routed.request.tokens)
            self.recorder.metrics.release(routed.record)

    def _url(self, destination: str) -> str:
        endpoint = self._endpoint(destination)
        return destination if endpoint is None else endpoint.url

    def _endpoint(self, destination: str) -> Endpoint | None:
        endpoints = self.relay.router.pool.endpoints
        return next((each for each in endpoints if destination and each.destination == destination), None)
