"""One stream of Envoy's external processing: takes its messages, returns the answers. No I/O with Envoy."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from urllib.parse import unquote

from penstock.dialects.messages.errors import is_anthropic
from penstock.gateway.admission.intake import UNCODED
from penstock.gateway.extproc.messages import (
    BodyMode,
    CommonResponse,
    ImmediateResponse,
    MalformedMessageError,
    MessagePart,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.extproc.routed_requests import (
    NAMESPACE,
    PICK_KEY,
    PROCESS_KEY,
    RoutedRequest,
    RoutedRequests,
)
from penstock.gateway.relay.attempt import local_reply_headers
from penstock.gateway.requests.apis import gateway_error, rejection_reason
from penstock.gateway.requests.generation_body import received_whole
from penstock.gateway.responses.expected_reply import expected_reply, make_observer
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import ReplyObserver, StreamObserver
from penstock.gateway.routing.pick_request import NoEndpointError
from penstock.gateway.upstream.exchange import REPLACED, Headers
from penstock.http.errors import ApiError
from penstock.http.request import first_values
from penstock.telemetry.trace_context import TRACESTATE, inject_trace_context

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
HEADER_PREFIXES = ("x-gateway", "x-llm-d")
"""Prefixes of the protocol's header names; every header is set with both."""
DESTINATIONS = tuple(f"{prefix}-destination-endpoint" for prefix in HEADER_PREFIXES)
SUBSETS = tuple(f"{name}-subset" for name in DESTINATIONS)
SERVED = tuple(f"{name}-served" for name in DESTINATIONS)
CONTROL_HEADERS = (*DESTINATIONS, *SUBSETS, *SERVED)
"""Headers that are never accepted from clients."""
MAX_CHUNK_BYTES = 62_000
"""Largest chunk of a full-duplex body that Envoy accepts."""
REQUEST_ID = b"x-request-id"


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
        self._headers: Headers = []
        self._names: dict[bytes, bytes] = {}
        """The latest value of each header."""
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self.receiving = True
        """The body is incomplete."""
        self._over_budget = False
        self._request_id = ""
        self._pick = requests.new_pick()
        self._is_named = False
        """Envoy has the pick's name."""
        self._observer: StreamObserver | ReplyObserver | None = None

    @property
    def is_over(self) -> bool:
        """Whether Envoy has everything it needs of the gateway, and shows it no reply. Ending the stream then
        keeps the rest of the request independent of the gateway: Envoy fails it if an open stream breaks."""
        answered, shows_no_reply = self._record is None, self._response_mode is BodyMode.NONE
        is_whole = self._request_mode is not BodyMode.FULL_DUPLEX_STREAMED
        return bool(self._headers) and answered and shows_no_reply and is_whole

    async def receive(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """The answers to a message: none yet, one, or several with the chunks of a body. Waits if the request
        has to. Raises MalformedMessageError."""
        if message.request_mode is not None and message.response_mode is not None:
            self._request_mode, self._response_mode = message.request_mode, message.response_mode
        match message.part:
            case MessagePart.REQUEST_HEADERS:
                answers = await self._on_request_headers(message)
            case MessagePart.REQUEST_BODY:
                answers = await self._on_request_body(message)
            case MessagePart.REQUEST_TRAILERS:
                answers = await self._on_request_trailers()
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
            self._reject(gateway_error(500, "internal", "The gateway failed to handle this request."))

    def malformed(self) -> None:
        """Envoy, or another peer, sent a malformed message: reject the request."""
        if self._record is not None:
            self._reject(gateway_error(400, "malformed", "The external processor got a malformed message."))

    def closed(self) -> None:
        """Envoy has ended the stream, or the connection broke. Called once, at the end."""
        self._requests.open_streams -= 1
        self._requests.budget.hold(self, 0)
        if self._record is not None:
            self._record.outcome = Outcome.CLIENT_DISCONNECT  # before the end of its body
            self._requests.finish(self._record)
            self._record = None
        self._end_observation()
        if self._routed is not None:
            self._routed.is_open = False
            if not self._is_named:
                self._requests.left_unnamed(self._routed)

    def on_over_budget(self) -> None:
        """All bodies together are too large, and of the incomplete ones this is the largest."""
        self._over_budget = True
        self._body.clear()

    # -- the request

    async def _on_request_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._headers:
            raise MalformedMessageError("request headers came twice in one stream")
        self._headers, self._names = message.headers, dict(message.headers)
        self._request_id = self._names.get(REQUEST_ID, b"").decode("latin-1")
        if message.observing:
            return []
        decoded = unquote(self._names.get(b":path", b"").partition(b"?")[0].decode("latin-1"))
        path = self._requests.intake.routes.route(decoded)
        self._record = RequestRecord(
            path,
            self._request_id,
            self._names.get(b":method", b"").decode("latin-1"),
            self._requests.tracing.extract(message.headers),
            began_at=self._requests.relay.clock(),
            messages_errors=is_anthropic(path, self._names),
        )
        self._requests.recorder.metrics.request_started(self._record)
        subset = _first_hint(message, SUBSET_NAMESPACE, SUBSETS)
        self._subset = None if subset is None else frozenset(subset)
        address = self._names.get(b"x-forwarded-for", b"").rpartition(b",")[2]  # which Envoy appends
        headers = first_values(message.headers)
        try:
            await self._requests.intake.authorize(self._record, headers, address.decode("latin-1").strip())
        except ApiError as error:
            return [self._reject(error)]
        waits = self._request_mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
        if not waits or message.end:
            return await self._pick_endpoint(MessagePart.REQUEST_HEADERS)
        if self._request_mode is BodyMode.BUFFERED:
            metadata = {NAMESPACE: {PICK_KEY: self._pick}}  # the client may leave before it is picked for
            return [
                CommonResponse(MessagePart.REQUEST_HEADERS, remove_headers=CONTROL_HEADERS, metadata=metadata)
            ]
        return []

    async def _on_request_body(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._record is None:  # picked by the headers, or rejected
            return [CommonResponse(MessagePart.REQUEST_BODY)]
        self._is_named = self._request_mode is BodyMode.BUFFERED  # by the answer to the headers
        self._body += message.body
        limit = self._requests.intake.bodies.max_read
        if len(self._body) > limit:
            text = f"The request body is larger than the {limit} bytes allowed by --max-request-bytes."
            return [self._reject(gateway_error(413, "too_large", text))]
        budget = self._requests.budget
        budget.hold(self, len(self._body))
        if self._over_budget:
            return [self._reject(budget.refusal())]
        if not message.end and self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return []
        return await self._pick_endpoint(MessagePart.REQUEST_BODY)

    async def _on_request_trailers(self) -> list[ProcessingResponse]:
        if self._record is None:
            return [CommonResponse(MessagePart.REQUEST_TRAILERS)]
        return await self._pick_endpoint(MessagePart.REQUEST_TRAILERS)

    async def _pick_endpoint(self, part: MessagePart) -> list[ProcessingResponse]:
        """Pick an endpoint, and tell Envoy; no more of the request will come that could decide."""
        record, requests = self._record, self._requests
        assert record is not None, "an endpoint is picked once"
        self.receiving = False
        raw = bytes(self._body)
        self._body.clear()
        headers = [pair for pair in self._headers if not pair[0].startswith(b":")]
        received = await received_whole(raw) if raw else None
        intake = requests.intake
        reads_reply = intake.reads_reply(record.method, record.path)
        try:
            incoming = intake.read(
                record,
                headers,
                received,
                session=intake.session_in(headers),
                relayed_headers=intake.relayed_headers(headers, reads_reply=reads_reply),
                target=intake.routes.target(record.method, record.path, self._names.get(b":path", b"")),
                subset=self._subset,
            )
            router = requests.relay.router
            if (listing := router.models.reply(record, self._names)) is not None:
                return [self._answer(listing)]
            request = await router.prepare(incoming, record)
        except ApiError as error:
            return [self._reject(error)]
        except NoEndpointError as refusal:
            return [self._reject(refusal.as_error())]
        try:
            record.request_id = self._request_id = self._request_id or str(uuid.uuid4())
            routed = requests.pick(
                request,
                self._request_id,
                pick=self._pick,
                record=record,
                expects=expected_reply(incoming.body, record.path),
            )
        except NoEndpointError as refusal:
            rejection = self._reject(refusal.as_error())
            requests.relay.router.finish(request, record)
            return [rejection]
        self._record, self._routed = None, routed
        requests.budget.hold(self, 0)
        assert request.incoming is not None, "the router has prepared it"
        sent = request.incoming_for(routed.endpoints[0]).raw
        relayed = raw if received is None or sent == received.text else b"".join(received.values.filled(sent))
        answers = list(self._forward(part, routed, raw, relayed))
        if part is MessagePart.REQUEST_TRAILERS:
            answers.append(CommonResponse(part))
        return answers

    def _forward(
        self, part: MessagePart, routed: RoutedRequest, raw: bytes, relayed: bytes
    ) -> Iterator[ProcessingResponse]:
        """``relayed``: the body that the endpoint gets in the place of ``raw``."""
        destinations = ",".join(routed.destinations)
        headers = [(name.encode(), destinations.encode()) for name in DESTINATIONS]
        if REQUEST_ID not in self._names:
            headers.append((REQUEST_ID, self._request_id.encode()))
        form = routed.endpoints[0].upstream.form
        headers += form.fields
        record = routed.record
        if UNCODED[0] in self._names and self._requests.intake.reads_reply(record.method, record.path):
            headers.append(UNCODED)
        trace = record.trace
        headers += inject_trace_context([], trace)
        removed = (*SUBSETS, *SERVED)
        given = {name for name, _ in headers}
        removed += tuple(sorted(name.decode() for name in form.dropped - REPLACED - given))
        if trace is not None and trace.is_root:
            removed += (TRACESTATE.decode(),)
        values = dict.fromkeys(DESTINATIONS, destinations)
        metadata = {NAMESPACE: {**values, PROCESS_KEY: self._requests.process, PICK_KEY: routed.pick}}
        rewritten = None if relayed == raw else relayed
        if part is MessagePart.REQUEST_HEADERS or self._request_mode is BodyMode.BUFFERED:
            if rewritten is not None:
                headers.append((b"content-length", b"%d" % len(rewritten)))
            yield CommonResponse(part, headers, removed, rewritten, metadata=metadata)
            return
        yield CommonResponse(
            MessagePart.REQUEST_HEADERS, headers, (*removed, "content-length"), metadata=metadata
        )
        yield from _chunks(MessagePart.REQUEST_BODY, rewritten or raw, end=part is MessagePart.REQUEST_BODY)

    def _answer(self, body: bytes) -> ImmediateResponse:
        """Answer with what the gateway knows itself."""
        record, self._record = self._record, None
        assert record is not None, "a request is answered once"
        record.outcome, record.status, record.bytes_out = Outcome.OK, 200, len(body)
        self._requests.finish(record)
        headers = [(b"content-type", b"application/json")]
        return ImmediateResponse(200, headers, body, "penstock_models")

    def _reject(self, error: ApiError) -> ImmediateResponse:
        record, self._record = self._record, None
        assert record is not None, "a request is rejected once"
        self._body.clear()
        self._requests.budget.hold(self, 0)
        record.outcome, record.status = Outcome.REJECTED, error.status
        record.reason = record.reason or rejection_reason(error)
        self._requests.finish(record)
        return ImmediateResponse(
            error.status,
            local_reply_headers(error),
            record.error_body(error),
            f"penstock_{record.reason}",
        )

    # -- the reply

    def _on_response_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._routed is None:  # the endpoint was picked in the stream of another filter of this Envoy
            self._routed = self._requests.find_unobserved(
                message.attributes.get("request.id", self._request_id), message.metadata
            )
        if self._routed is not None and not self._routed.counted:
            served = _first_hint(message, NAMESPACE, SERVED)
            self._routed.served = served[0] if served else message.attributes.get("upstream.address", "")
            status = next((_status(value) for name, value in message.headers if name == b":status"), 0)
            self._requests.on_head(self._routed, status, message.headers)
            self._routed.observing = self._is_named = True
            self._routed.seen_status = status
            routed = self._routed
            if status == 404:
                self._requests.relay.router.on_not_found(routed.request, routed.endpoints[0])
            self._observer = make_observer(
                status,
                message.headers,
                routed.expects,
                on_response=lambda id: self._requests.learn_response(id, routed),
                strip_usage=False,
                held=self._requests.relay.held,
            )
            if isinstance(self._observer, StreamObserver):
                self._observer.on_first_token = lambda: self._requests.on_first_token(routed)
            self._routed.observer = self._observer
        if message.end:
            self._finish()
        headers = [] if self._routed is None else self._routed.record.reply_headers
        return [CommonResponse(MessagePart.RESPONSE_HEADERS, headers)]

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
            self._observer.close()
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
    for start in range(0, max(len(body), 1), MAX_CHUNK_BYTES):
        stop = start + MAX_CHUNK_BYTES
        yield CommonResponse(part, chunk=body[start:stop], end=end and stop >= len(body))
