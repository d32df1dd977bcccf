"""One request as Envoy tells it: when to pick, what to answer. Messages in, messages out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from penstock.gateway.attempt import answer_headers, error_body, expected, observer_of
from penstock.gateway.extproc.messages import Answer, BodyMode, Immediate, Part, Reply, Told
from penstock.gateway.extproc.picks import NAMESPACE, PROCESS_KEY, Pick, Picks
from penstock.gateway.observer import ReplyObserver, StreamObserver
from penstock.gateway.outcome import Outcome
from penstock.gateway.picker import Refusal, pick_request
from penstock.gateway.relay import Record
from penstock.gateway.request import GENERATION_PATHS, BodyError, RequestBody, read_request
from penstock.gateway.trace import TRACESTATE, passed_on
from penstock.http.errors import ApiError

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
GENERATIONS = ("x-gateway", "x-llm-d")
"""Beginnings of the protocol's names; what is said is said with both."""
DESTINATIONS = tuple(f"{prefix}-destination-endpoint" for prefix in GENERATIONS)
SUBSETS = tuple(f"{name}-subset" for name in DESTINATIONS)
SERVED = tuple(f"{name}-served" for name in DESTINATIONS)
CONTROL_HEADERS = (*DESTINATIONS, *SUBSETS, *SERVED)
"""Never taken from clients."""
MOST_CHUNK_BYTES = 62_000
"""Of a full-duplex body; Envoy refuses larger ones."""
REQUEST_ID = b"x-request-id"


class Exchange:
    """One stream of ``ExternalProcessor.Process``: one request, and its reply where Envoy sends it.

    With a buffered or full-duplex request body the pick is made when the body is whole; in the other body
    modes with the headers alone.
    """

    def __init__(self, picks: Picks) -> None:
        picks.exchanges += 1
        self._picks = picks
        self._record: Record | None = None
        """Of a request that has not been picked for or refused."""
        self._pick: Pick | None = None
        self._request_mode = self._response_mode = BodyMode.BUFFERED
        self._headers: dict[bytes, bytes] = {}
        self._subset: list[str] | None = None
        self._body = bytearray()
        self._request_id = ""
        self._observer: StreamObserver | ReplyObserver | None = None

    def receive(self, told: Told) -> list[Answer]:
        """What to answer to a message: nothing yet, or one message, or a body in several."""
        if told.request_mode is not None and told.response_mode is not None:
            self._request_mode, self._response_mode = told.request_mode, told.response_mode
        match told.part:
            case Part.REQUEST_HEADERS:
                answers = self._on_request_headers(told)
            case Part.REQUEST_BODY:
                answers = self._on_request_body(told)
            case Part.REQUEST_TRAILERS:
                answers = self._on_request_trailers()
            case Part.RESPONSE_HEADERS:
                answers = self._on_response_headers(told)
            case Part.RESPONSE_BODY:
                answers = self._on_response_body(told)
            case Part.RESPONSE_TRAILERS:
                self._finish()
                answers = [Reply(Part.RESPONSE_TRAILERS)]
        return [] if told.observing else answers

    def failed(self) -> None:
        """The gateway cannot handle the request."""
        if self._record is not None:
            self._refuse(500, "internal", "The gateway failed to handle this request.")

    def closed(self) -> None:
        """Envoy has ended the stream, or the connection broke. To be called once, at the end."""
        self._picks.exchanges -= 1
        if self._record is not None:
            self._record.outcome = Outcome.CLIENT_DISCONNECT  # within its body
            self._picks.close(self._record)
            self._record = None
        self._observed()

    # -- the request

    def _on_request_headers(self, told: Told) -> list[Answer]:
        self._headers = dict(told.headers)
        self._request_id = self._headers.get(REQUEST_ID, b"").decode("latin-1")
        if told.observing:
            return []
        path = self._headers.get(b":path", b"").partition(b"?")[0].decode("latin-1")
        method = self._headers.get(b":method", b"").decode("latin-1")
        trace = self._picks.tracing.trace(told.headers)
        self._record = Record(path, self._request_id, method, trace, began_at=self._picks.clock())
        self._picks.ledger.metrics.began(self._record)
        self._subset = _said(told, SUBSET_NAMESPACE, SUBSETS)
        try:
            self._picks.keys.check(path, {"headers": told.headers})
        except ApiError as error:
            return [self._refuse(error.status, str(error.code), str(error))]
        waits = self._request_mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
        if not waits or told.end:
            return self._choose(Part.REQUEST_HEADERS)
        if self._request_mode is BodyMode.BUFFERED:
            return [Reply(Part.REQUEST_HEADERS, remove_headers=CONTROL_HEADERS)]
        return []

    def _on_request_body(self, told: Told) -> list[Answer]:
        if self._record is None:  # picked with the headers, or refused
            return [Reply(Part.REQUEST_BODY)]
        self._body += told.body
        limit = self._picks.max_request_bytes
        if len(self._body) > limit:
            text = f"The request body is larger than the {limit} bytes of --max-request-bytes."
            return [self._refuse(413, "too_large", text)]
        if not told.end and self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return []
        return self._choose(Part.REQUEST_BODY)

    def _on_request_trailers(self) -> list[Answer]:
        if self._record is None:
            return [Reply(Part.REQUEST_TRAILERS)]
        answers = self._choose(Part.REQUEST_TRAILERS)
        if not isinstance(answers[-1], Immediate):
            answers.append(Reply(Part.REQUEST_TRAILERS))
        return answers

    def _choose(self, part: Part) -> list[Answer]:
        """The request is known as far as it will be."""
        record, raw = self._record, bytes(self._body)
        assert record is not None, "a request is picked for once"
        self._body.clear()
        record.bytes_in = len(raw)
        body = None
        if raw and record.path in GENERATION_PATHS:
            try:
                body = self._picks.rewrites.apply(read_request(raw))
            except BodyError as error:
                return [self._refuse(400, "bad_body", f"The request body cannot be read: {error}")]
            record.asks(body)
        session = self._headers.get(self._picks.session_header)
        named = None if session is None else session.decode("latin-1")
        request = pick_request(body, named, self._picks.ttft_slo_s)
        try:
            record.request_id = self._request_id = self._request_id or str(uuid.uuid4())
            pick = self._picks.pick(request, self._request_id, self._subset, record, expected(body))
        except Refusal as refusal:
            return [self._refuse(refusal.status, refusal.reason, str(refusal))]
        self._record, self._pick = None, pick
        return list(self._sent_on(part, pick, raw, body))

    def _sent_on(self, part: Part, pick: Pick, raw: bytes, body: RequestBody | None) -> Iterator[Answer]:
        destinations = ",".join(pick.destinations)
        headers = [(name.encode(), destinations.encode()) for name in DESTINATIONS]
        if REQUEST_ID not in self._headers:
            headers.append((REQUEST_ID, self._request_id.encode()))
        if self._picks.endpoint_api_key is not None:
            headers.append((b"authorization", b"Bearer " + self._picks.endpoint_api_key.encode()))
        trace = pick.record.trace
        headers += passed_on([], trace)
        removed = (*SUBSETS, *SERVED)
        if self._picks.endpoint_api_key is not None:
            removed += ("x-api-key",)
        if trace is not None and trace.begins_here:
            removed += (TRACESTATE.decode(),)
        told = dict.fromkeys(DESTINATIONS, destinations)
        metadata = {NAMESPACE: {**told, PROCESS_KEY: self._picks.process}}
        rewritten = None if body is None or body.raw == raw else body.raw
        if part is Part.REQUEST_HEADERS or self._request_mode is BodyMode.BUFFERED:
            if rewritten is not None:
                headers.append((b"content-length", b"%d" % len(rewritten)))
            yield Reply(part, headers, removed, rewritten, metadata=metadata)
            return
        yield Reply(Part.REQUEST_HEADERS, headers, (*removed, "content-length"), metadata=metadata)
        yield from _chunks(Part.REQUEST_BODY, rewritten or raw, end=part is Part.REQUEST_BODY)

    def _refuse(self, status: int, reason: str, message: str) -> Immediate:
        record, self._record = self._record, None
        assert record is not None, "a request is refused once"
        self._body.clear()
        record.outcome, record.reason, record.status = Outcome.REJECTED, reason, status
        self._picks.close(record)
        return Immediate(status, answer_headers(status), error_body(reason, message), f"penstock_{reason}")

    # -- the reply

    def _on_response_headers(self, told: Told) -> list[Answer]:
        if self._pick is None:  # another filter of the same Envoy made it
            self._pick = self._picks.find(told.attributes.get("request.id", self._request_id))
        if self._pick is not None:
            served = _said(told, NAMESPACE, SERVED)
            self._pick.served = served[0] if served else told.attributes.get("upstream.address", "")
            status = next((int(value) for name, value in told.headers if name == b":status"), 0)
            self._pick.observing = True
            self._pick.seen_status = status
            self._observer = observer_of(status, told.headers, self._pick.expects, strip_usage=False)
            self._pick.observer = self._observer
        if told.end:
            self._finish()
        return [Reply(Part.RESPONSE_HEADERS)]

    def _on_response_body(self, told: Told) -> list[Answer]:
        if self._observer is not None:
            self._observer.feed(told.body, self._picks.clock())
        if told.end:
            self._finish()
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return list(_chunks(Part.RESPONSE_BODY, told.body, end=told.end))
        return [Reply(Part.RESPONSE_BODY)]

    def _finish(self) -> None:
        """The reply is whole. The stream may be kept open for seconds."""
        if self._observer is not None:
            self._observer.finish(self._picks.clock())
        self._observed()

    def _observed(self) -> None:
        """No more of the reply will come."""
        if self._observer is not None and self._pick is not None:
            self._picks.observed(self._pick)
        self._observer = None


def _said(told: Told, namespace: str, names: tuple[str, ...]) -> list[str] | None:
    """The first of ``names`` that is set."""
    texts = told.metadata.get(namespace, {})
    return next((texts[name] for name in names if name in texts), None)


def _chunks(part: Part, body: bytes, *, end: bool) -> Iterator[Answer]:
    for start in range(0, max(len(body), 1), MOST_CHUNK_BYTES):
        stop = start + MOST_CHUNK_BYTES
        yield Reply(part, chunk=body[start:stop], end=end and stop >= len(body))
