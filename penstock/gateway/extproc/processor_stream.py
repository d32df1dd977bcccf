"""One stream of Envoy's external processing: takes its messages, returns the answers. No I/O with Envoy."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

from penstock.gateway.extproc.messages import (
    BodyMode,
    CommonResponse,
    ImmediateResponse,
    MalformedMessageError,
    MessagePart,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.extproc.routed_requests import NAMESPACE, PROCESS_KEY, RoutedRequest, RoutedRequests
from penstock.gateway.relay.attempt import expected_reply, local_reply_headers, make_observer
from penstock.gateway.relay.request_record import RequestRecord
from penstock.gateway.requests.apis import gateway_error, has_messages_errors
from penstock.gateway.requests.relayed_routes import check_relayed
from penstock.gateway.requests.request_body import GENERATION_PATHS, RequestBody, read_request, response_of
from penstock.gateway.requests.sessions import session_named
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.response_observer import ReplyObserver, StreamObserver
from penstock.gateway.routing.picker import NoEndpointError, PickRequest, pick_request
from penstock.gateway.upstream.exchange import Headers, without_hop_by_hop
from penstock.http.access_keys import CLIENT_KEYS, KEY_HEADERS
from penstock.http.errors import ApiError
from penstock.telemetry.trace_context import TRACESTATE, inject_trace_context

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
HEADER_PREFIXES = ("x-gateway", "x-llm-d")
"""Prefixes of the protocol's header names; every header is set with both."""
DESTINATIONS = tuple(f"{prefix}-destination-endpoint" for prefix in HEADER_PREFIXES)
SUBSETS = tuple(f"{name}-subset" for name in DESTINATIONS)
SERVED = tuple(f"{name}-served" for name in DESTINATIONS)
CONTROL_HEADERS = (*DESTINATIONS, *SUBSETS, *SERVED)
"""Headers that are never accepted from clients."""
MOST_CHUNK_BYTES = 62_000
"""Largest chunk of a full-duplex body that Envoy accepts."""
REQUEST_ID = b"x-request-id"


class ResponseToFind(NamedTuple):
    """A request that waits for the endpoint that has the response which it names."""

    id: str
    part: MessagePart
    raw: bytes
    body: RequestBody | None
    request: PickRequest


class ProcessorStream:
    """One stream of ``ExternalProcessor.Process``: one request, and its reply if Envoy sends replies.

    With a buffered or full-duplex request body an endpoint is picked when the body is complete, in the other
    body modes by the headers alone.
    """

    def __init__(self, requests: RoutedRequests) -> None:
        requests.open_streams += 1
        self._requests = requests
        self._record: RequestRecord | None = None
        """The request until its endpoint is picked or it is rejected."""
        self._routed: RoutedRequest | None = None
        self._request_mode = self._response_mode = BodyMode.BUFFERED
        self._headers: dict[bytes, bytes] = {}
        self._subset: list[str] | None = None
        self._body = bytearray()
        self._request_id = ""
        self._observer: StreamObserver | ReplyObserver | None = None
        self._search: ResponseToFind | None = None

    @property
    def searches(self) -> bool:
        """Whether :meth:`search` comes next."""
        return self._search is not None

    async def search(self) -> list[ProcessingResponse]:
        """The answers to the latest message: the request names a stored response, and endpoints may have to
        be asked for it."""
        search, self._search = self._search, None
        assert search is not None
        relay = self._requests.relay
        try:
            search.request.owners = await relay.search.find(
                search.id, self._headers_of_endpoints(), relay.clock(), previous=search.body is not None
            )
        except ApiError as error:
            return [self._reject(error.status, str(error.code), error.message, error)]
        return self._route(search.part, search.raw, search.body, search.request)

    def receive(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """The answers to a message: none yet, one, or several with the chunks of a body. Raises
        MalformedMessageError."""
        if message.request_mode is not None and message.response_mode is not None:
            self._request_mode, self._response_mode = message.request_mode, message.response_mode
        match message.part:
            case MessagePart.REQUEST_HEADERS:
                answers = self._on_request_headers(message)
            case MessagePart.REQUEST_BODY:
                answers = self._on_request_body(message)
            case MessagePart.REQUEST_TRAILERS:
                answers = self._on_request_trailers()
            case MessagePart.RESPONSE_HEADERS:
                answers = self._on_response_headers(message)
            case MessagePart.RESPONSE_BODY:
                answers = self._on_response_body(message)
            case MessagePart.RESPONSE_TRAILERS:
                self._finish()
                answers = [CommonResponse(MessagePart.RESPONSE_TRAILERS)]
        return [] if message.observing else answers

    def failed(self) -> None:
        """The gateway failed to handle the request: reject it."""
        if self._record is not None:
            self._reject(500, "internal", "The gateway failed to handle this request.")

    def malformed(self) -> None:
        """Envoy, or another peer, sent a malformed message: reject the request."""
        if self._record is not None:
            self._reject(400, "malformed", "The external processor got a malformed message.")

    def closed(self) -> None:
        """Envoy has ended the stream, or the connection broke. Called once, at the end."""
        self._requests.open_streams -= 1
        if self._record is not None:
            self._record.outcome = Outcome.CLIENT_DISCONNECT  # before the end of its body
            self._requests.finish(self._record)
            self._record = None
        self._end_observation()

    # -- the request

    def _on_request_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._headers:
            raise MalformedMessageError("request headers came twice in one stream")
        self._headers = dict(message.headers)
        self._request_id = self._headers.get(REQUEST_ID, b"").decode("latin-1")
        if message.observing:
            return []
        path = self._headers.get(b":path", b"").partition(b"?")[0].decode("latin-1")
        method = self._headers.get(b":method", b"").decode("latin-1")
        trace = self._requests.tracing.extract(message.headers)
        self._record = RequestRecord(
            path,
            self._request_id,
            method,
            trace,
            began_at=self._requests.relay.clock(),
            messages_errors=has_messages_errors(path, self._headers),
        )
        self._requests.recorder.metrics.request_started(self._record)
        self._subset = _first_hint(message, SUBSET_NAMESPACE, SUBSETS)
        try:
            tenant = self._requests.keys.check(path, {"headers": message.headers})
            check_relayed(method, unquote(path))
        except ApiError as error:
            return [self._reject(error.status, str(error.code), error.message, error)]
        address = self._headers.get(b"x-forwarded-for", b"").rpartition(b",")[2]  # which Envoy appends
        self._record.client = tenant or address.decode("latin-1").strip()
        waits = self._request_mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
        if not waits or message.end:
            return self._pick_endpoint(MessagePart.REQUEST_HEADERS)
        if self._request_mode is BodyMode.BUFFERED:
            return [CommonResponse(MessagePart.REQUEST_HEADERS, remove_headers=CONTROL_HEADERS)]
        return []

    def _on_request_body(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._record is None:  # picked by the headers, or rejected
            return [CommonResponse(MessagePart.REQUEST_BODY)]
        self._body += message.body
        limit = self._requests.max_request_bytes
        if len(self._body) > limit:
            text = f"The request body is larger than the {limit} bytes allowed by --max-request-bytes."
            return [self._reject(413, "too_large", text)]
        if not message.end and self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return []
        return self._pick_endpoint(MessagePart.REQUEST_BODY)

    def _on_request_trailers(self) -> list[ProcessingResponse]:
        if self._record is None:
            return [CommonResponse(MessagePart.REQUEST_TRAILERS)]
        return self._pick_endpoint(MessagePart.REQUEST_TRAILERS)

    def _pick_endpoint(self, part: MessagePart) -> list[ProcessingResponse]:
        """Pick an endpoint; no more of the request will come that could decide."""
        record, raw = self._record, bytes(self._body)
        assert record is not None, "an endpoint is picked once"
        self._body.clear()
        record.bytes_in = len(raw)
        body = None
        if raw and record.path in GENERATION_PATHS:
            try:
                body = self._requests.rewrites.apply(read_request(raw))
            except ApiError as error:
                return [self._reject(error.status, "bad_body", error.message, error)]
            record.set_body(body)
        session = session_named(self._headers, self._requests.session_header)
        request = pick_request(body, session, self._requests.relay.ttft_slo_s)
        id = response_of(unquote(record.path), body)
        if id is not None:
            self._search = ResponseToFind(id, part, raw, body, request)
            return []
        return self._route(part, raw, body, request)

    def _route(
        self, part: MessagePart, raw: bytes, body: RequestBody | None, request: PickRequest
    ) -> list[ProcessingResponse]:
        """Pick an endpoint, and tell Envoy."""
        record = self._record
        assert record is not None, "an endpoint is picked once"
        try:
            record.request_id = self._request_id = self._request_id or str(uuid.uuid4())
            routed = self._requests.pick(
                request,
                self._request_id,
                subset=self._subset,
                record=record,
                expects=expected_reply(body, record.path),
            )
        except NoEndpointError as refusal:
            return [self._reject(refusal.status, refusal.reason, str(refusal))]
        self._record, self._routed = None, routed
        answers = list(self._forward(part, routed, raw, body))
        if part is MessagePart.REQUEST_TRAILERS:
            answers.append(CommonResponse(part))
        return answers

    def _headers_of_endpoints(self) -> Headers:
        """The headers with which endpoints are asked for a response: the request's own."""
        key = self._requests.endpoint_api_key
        headers = [pair for pair in self._headers.items() if not pair[0].startswith(b":")]
        if key is not None:
            headers = [pair for pair in headers if pair[0] not in CLIENT_KEYS]
            headers.append((b"authorization", b"Bearer " + key.encode()))
        return without_hop_by_hop(headers)

    def _forward(
        self, part: MessagePart, routed: RoutedRequest, raw: bytes, body: RequestBody | None
    ) -> Iterator[ProcessingResponse]:
        destinations = ",".join(routed.destinations)
        headers = [(name.encode(), destinations.encode()) for name in DESTINATIONS]
        if REQUEST_ID not in self._headers:
            headers.append((REQUEST_ID, self._request_id.encode()))
        if self._requests.endpoint_api_key is not None:
            headers.append((b"authorization", b"Bearer " + self._requests.endpoint_api_key.encode()))
        trace = routed.record.trace
        headers += inject_trace_context([], trace)
        removed = (*SUBSETS, *SERVED)
        if self._requests.endpoint_api_key is not None:
            removed += tuple(name.decode() for name in KEY_HEADERS)
        if trace is not None and trace.is_root:
            removed += (TRACESTATE.decode(),)
        values = dict.fromkeys(DESTINATIONS, destinations)
        metadata = {NAMESPACE: {**values, PROCESS_KEY: self._requests.process}}
        rewritten = None if body is None or body.raw == raw else body.raw
        if part is MessagePart.REQUEST_HEADERS or self._request_mode is BodyMode.BUFFERED:
            if rewritten is not None:
                headers.append((b"content-length", b"%d" % len(rewritten)))
            yield CommonResponse(part, headers, removed, rewritten, metadata=metadata)
            return
        yield CommonResponse(
            MessagePart.REQUEST_HEADERS, headers, (*removed, "content-length"), metadata=metadata
        )
        yield from _chunks(MessagePart.REQUEST_BODY, rewritten or raw, end=part is MessagePart.REQUEST_BODY)

    def _reject(
        self, status: int, reason: str, message: str, error: ApiError | None = None
    ) -> ImmediateResponse:
        """``error`` replaces the gateway's own error of this reason."""
        record, self._record = self._record, None
        assert record is not None, "a request is rejected once"
        self._body.clear()
        record.outcome, record.reason, record.status = Outcome.REJECTED, reason, status
        self._requests.finish(record)
        return ImmediateResponse(
            status,
            local_reply_headers(status),
            record.error_body(error or gateway_error(status, reason, message)),
            f"penstock_{reason}",
        )

    # -- the reply

    def _on_response_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._routed is None:  # the endpoint was picked in the stream of another filter of this Envoy
            self._routed = self._requests.find_unobserved(
                message.attributes.get("request.id", self._request_id)
            )
        if self._routed is not None:
            served = _first_hint(message, NAMESPACE, SERVED)
            self._routed.served = served[0] if served else message.attributes.get("upstream.address", "")
            status = next((_status(value) for name, value in message.headers if name == b":status"), 0)
            self._routed.observing = True
            self._routed.seen_status = status
            routed = self._routed
            self._observer = make_observer(
                status,
                message.headers,
                routed.expects,
                on_response=lambda id: self._requests.learn_response(id, routed),
                strip_usage=False,
            )
            self._routed.observer = self._observer
        if message.end:
            self._finish()
        return [CommonResponse(MessagePart.RESPONSE_HEADERS)]

    def _on_response_body(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._observer is not None:
            self._observer.feed(message.body, self._requests.relay.clock())
        if message.end:
            self._finish()
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return list(_chunks(MessagePart.RESPONSE_BODY, message.body, end=message.end))
        return [CommonResponse(MessagePart.RESPONSE_BODY)]

    def _finish(self) -> None:
        """The reply is complete. Envoy may keep the stream open for seconds."""
        if self._observer is not None:
            self._observer.finish(self._requests.relay.clock())
        self._end_observation()

    def _end_observation(self) -> None:
        """No more of the reply will come."""
        if self._observer is not None and self._routed is not None:
            self._requests.observation_ended(self._routed)
        self._observer = None


def _status(value: bytes) -> int:
    """Raises MalformedMessageError."""
    if len(value) != 3 or not value.isdigit():
        raise MalformedMessageError(f":status is {value[:60]!r}")
    return int(value)


def _first_hint(message: ProcessingRequest, namespace: str, names: tuple[str, ...]) -> list[str] | None:
    """The value of the first of ``names`` that the message's metadata has."""
    texts = message.metadata.get(namespace, {})
    return next((texts[name] for name in names if name in texts), None)


def _chunks(part: MessagePart, body: bytes, *, end: bool) -> Iterator[ProcessingResponse]:
    for start in range(0, max(len(body), 1), MOST_CHUNK_BYTES):
        stop = start + MOST_CHUNK_BYTES
        yield CommonResponse(part, chunk=body[start:stop], end=end and stop >= len(body))
