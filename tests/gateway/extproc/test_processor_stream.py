"""Exchanges as messages in and messages out: every body mode, without gRPC, Envoy or protobuf."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest

from penstock.config.watched_file import WatchedFile
from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.client_keys import ClientKeys
from penstock.gateway.admission.clients_file import KnownClients
from penstock.gateway.admission.intake import Intake
from penstock.gateway.extproc.messages import (
    AccessLogEntry,
    BodyMode,
    CommonResponse,
    ImmediateResponse,
    MalformedMessageError,
    MessagePart,
    ProcessingRequest,
)
from penstock.gateway.extproc.processor_stream import (
    CONTROL_HEADERS,
    DESTINATIONS,
    MAX_CHUNK_BYTES,
    ProcessorStream,
)
from penstock.gateway.extproc.routed_requests import LOG_DELAY_S, PROCESS_KEY, RoutedRequests
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.retry_policy import RetryPolicy
from penstock.gateway.requests.body_rest import BodyLimits
from penstock.gateway.requests.relayed_routes import RelayedRoutes
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.response_search import ResponseSearch
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.upstream.exchange import UpstreamRequest
from penstock.gateway.upstream.request_form import RequestForm
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.receive_budget import ReceiveBudget
from penstock.telemetry.trace_context import TracePropagator
from tests.gateway.routers import router_over

BODY = json.dumps({"model": "m", "prompt": "p", "stream": True}).encode()
STREAM = b'data: {"choices":[{"text":" a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
EMPTY_SUBSET: dict[str, dict[str, list[str]]] = {
    "envoy.lb.subset_hint": {"x-llm-d-destination-endpoint-subset": []}
}
PICKED = {"envoy.lb": {PROCESS_KEY: ["another"]}}


class World:
    """A gateway without sockets: two endpoints, the first with less to do, and a clock that stands still."""

    def __init__(
        self,
        *,
        rewrite: str | None = None,
        key: str | None = None,
        limit: int = 1 << 20,
        spans: bool = False,
        access_log: Literal["none", "all"] = "none",
        admission: Admission | None = None,
        client_keys: WatchedFile[KnownClients] | None = None,
    ) -> None:
        self.now = 100.0
        pool = EndpointPool(Upstream(), lambda endpoint: None)
        pool.update(
            ResolvedEndpoint(f"http://10.0.0.{n}:8000", destination=f"10.0.0.{n}:8000") for n in (1, 2)
        )
        self.endpoints = pool.endpoints
        self.endpoints[1].in_flight_tokens = 10**6
        picker = Picker({"tokens": 1.0})
        router = router_over(pool, picker, lambda: self.now, [] if rewrite is None else [rewrite])
        if admission is not None:
            router.admission = admission
        relay = Relay(router, RetryPolicy(router), Timeouts())
        self.metrics = GatewayMetrics(list)
        keys = ClientKeys([] if key is None else [key], client_keys, lambda: self.now)
        self.tracing = TracePropagator(spans=spans)
        self.requests = RoutedRequests(
            relay=relay,
            recorder=RequestRecorder(self.metrics, access_log),
            intake=Intake(keys, RelayedRoutes(), b"x-session-id", BodyLimits(limit, limit)),
            tracing=self.tracing,
        )

    def counts(self) -> dict[str, float]:
        """Outcome to requests."""
        found: dict[str, float] = {}
        for line in b"".join(self.metrics.exposition()).decode().splitlines():
            if line.startswith("penstock_gateway_request_total{"):
                outcome = line.split('outcome="')[1].split('"')[0]
                found[outcome] = found.get(outcome, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    def logged(self, request_id: str = "r", **fields: Any) -> None:
        fields = {"status": 200, "upstream": "10.0.0.1:8000", "attempts": 1, **fields}
        self.requests.on_log_entry(AccessLogEntry(request_id, "/v1/completions", **fields))


class Stream:
    """A stream whose requests need not wait."""

    def __init__(self, requests: RoutedRequests) -> None:
        self.stream = ProcessorStream(requests)
        self.closed, self.failed, self.malformed = (
            self.stream.closed,
            self.stream.failed,
            self.stream.malformed,
        )

    def receive(self, message: ProcessingRequest) -> list[Any]:
        try:
            self.stream.receive(message).send(None)
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers
        raise AssertionError("it waits")


def head(mode: BodyMode | None = BodyMode.BUFFERED, *, end: bool = False, **more: Any) -> ProcessingRequest:
    headers = [
        (b":method", b"POST"),
        (b":path", b"/v1/completions?x=1"),
        (b"x-request-id", b"r"),
        (b"transfer-encoding", b"chunked"),
    ]
    response = None if mode is None else BodyMode.NONE
    return ProcessingRequest(
        MessagePart.REQUEST_HEADERS, headers, end=end, request_mode=mode, response_mode=response, **more
    )


def body(data: bytes = BODY, *, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(MessagePart.REQUEST_BODY, body=data, end=end)


def picked(world: World) -> Stream:
    """A buffered request that has been picked for."""
    exchange = Stream(world.requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    return exchange


def picked_metadata(world: World) -> dict[str, dict[str, list[str]]]:
    """A buffered request that has been picked for; the metadata that Envoy repeats of it."""
    exchange = Stream(world.requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body())
    exchange.closed()
    return repeated(reply)


def repeated(reply: CommonResponse) -> dict[str, dict[str, list[str]]]:
    """The reply's metadata as Envoy repeats them."""
    return {space: {key: [text] for key, text in texts.items()} for space, texts in reply.metadata.items()}


def names(reply: CommonResponse) -> set[bytes]:
    return {name for name, _ in reply.set_headers}


def test_a_buffered_body_is_waited_for() -> None:
    exchange = Stream(World().requests)
    (first,) = exchange.receive(head())
    assert (first.set_headers, first.remove_headers) == ([], CONTROL_HEADERS)
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    assert reply.part is MessagePart.REQUEST_BODY
    assert reply.body is None
    assert dict(reply.set_headers) == {name.encode(): b"10.0.0.1:8000,10.0.0.2:8000" for name in DESTINATIONS}
    told = reply.metadata["envoy.lb"]
    assert {told[name] for name in DESTINATIONS} == {"10.0.0.1:8000,10.0.0.2:8000"}


TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01".encode()


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("given", [TRACEPARENT, None])
def test_the_model_server_gets_the_span_as_parent(given: bytes | None, mode: BodyMode) -> None:
    exchange = Stream(World(spans=True).requests)
    first = head(mode)
    first.headers += [(b"tracestate", b"v=1")] if given is None else [(b"traceparent", given)]
    exchange.receive(first)
    reply = exchange.receive(body())[0]
    assert isinstance(reply, CommonResponse)
    [sent] = [value for name, value in reply.set_headers if name == b"traceparent"]
    assert sent[3:35] == (b"a" * 32 if given else sent[3:35])
    assert sent != given
    assert ("tracestate" in reply.remove_headers) == (given is None)


def test_the_client_key_is_replaced() -> None:
    world = World(key="k")
    for endpoint in world.endpoints:
        endpoint.upstream.form = RequestForm((b"authorization", b"Bearer upstream"))
    exchange = Stream(world.requests)
    first = head()
    first.headers.append((b"x-api-key", b"k"))
    exchange.receive(first)
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    assert (b"authorization", b"Bearer upstream") in reply.set_headers
    assert {"x-api-key", "api-key"} <= set(reply.remove_headers)


@pytest.mark.parametrize("same", [True, False])
def test_envoy_retries_where_the_key_is_the_same(same: bool) -> None:
    """It sends the same headers to all endpoints that it is given."""
    world = World()
    form = RequestForm((b"api-key", b"secret"), headers={"x-org": "o", "x-team": ""})
    world.endpoints[0].upstream = Upstream(form=form)
    if same:
        world.endpoints[1].upstream = world.endpoints[0].upstream
    exchange = Stream(world.requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    headers = dict(reply.set_headers)
    assert (headers[b"api-key"], headers[b"x-org"]) == (b"secret", b"o")
    assert {"x-team", "authorization", "x-api-key", "cookie"} <= set(reply.remove_headers)
    assert not {"api-key", "x-org", "host"} & set(reply.remove_headers)
    destinations = headers[DESTINATIONS[0].encode()]
    assert destinations == (b"10.0.0.1:8000,10.0.0.2:8000" if same else b"10.0.0.1:8000")


def test_without_spans_trace_contexts_are_left_alone() -> None:
    exchange = Stream(World().requests)
    first = head()
    first.headers.append((b"traceparent", TRACEPARENT))
    exchange.receive(first)
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    assert b"traceparent" not in names(reply)


@pytest.mark.parametrize("status", [200, 503])
def test_the_log_has_the_ids(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Of requests that were picked for, and of those that were refused."""
    world = World(access_log="all")
    if status == 503:
        for endpoint in world.endpoints:
            endpoint.scrape_failed(connected=False)
            endpoint.scrape_failed(connected=False)
    exchange = Stream(world.requests)
    first = head()
    first.headers += [(b":method", b"POST"), (b"traceparent", TRACEPARENT)]
    exchange.receive(first)
    exchange.receive(body())
    exchange.closed()
    world.logged()
    [line] = [json.loads(record.getMessage()) for record in caplog.records if "access" in record.name]
    assert (line["request_id"], line["trace_id"], line["method"]) == ("r", "a" * 32, "POST")
    assert (line["status"], line["model"]) == (status, "m")


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL])
def test_other_modes_are_picked_for_by_headers(mode: BodyMode) -> None:
    exchange = Stream(World().requests)
    (reply,) = exchange.receive(head(mode))
    assert isinstance(reply, CommonResponse)
    assert DESTINATIONS[0].encode() in names(reply)
    assert exchange.receive(body()) == [CommonResponse(MessagePart.REQUEST_BODY)]


def test_a_full_duplex_body_is_sent_on_in_chunks() -> None:
    data = json.dumps({"model": "m", "prompt": "p" * 2 * MAX_CHUNK_BYTES}).encode()
    exchange = Stream(World().requests)
    assert exchange.receive(head(BodyMode.FULL_DUPLEX_STREAMED)) == []
    assert exchange.receive(body(data[:1000], end=False)) == []
    first, *chunks = exchange.receive(body(data[1000:]))
    assert isinstance(first, CommonResponse)
    assert first.part is MessagePart.REQUEST_HEADERS
    assert b"".join(chunk.chunk or b"" for chunk in chunks if isinstance(chunk, CommonResponse)) == data
    assert [chunk.end for chunk in chunks if isinstance(chunk, CommonResponse)] == [False, False, True]


def test_a_full_duplex_body_may_end_with_trailers() -> None:
    exchange = Stream(World().requests)
    exchange.receive(head(BodyMode.FULL_DUPLEX_STREAMED))
    exchange.receive(body(end=False))
    answers = exchange.receive(ProcessingRequest(MessagePart.REQUEST_TRAILERS, end=True))
    assert [each.part for each in answers if isinstance(each, CommonResponse)] == [
        MessagePart.REQUEST_HEADERS,
        MessagePart.REQUEST_BODY,
        MessagePart.REQUEST_TRAILERS,
    ]
    assert not any(each.end for each in answers if isinstance(each, CommonResponse))


def test_nothing_of_the_clients_headers_is_echoed() -> None:
    exchange = Stream(World().requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    assert names(reply) == {name.encode() for name in DESTINATIONS}


def test_a_request_without_id_gets_one() -> None:
    exchange = Stream(World().requests)
    told = head(BodyMode.NONE)
    told.headers = [(b":method", b"GET"), (b":path", b"/v1/models")]
    (reply,) = exchange.receive(told)
    assert isinstance(reply, CommonResponse)
    assert b"x-request-id" in names(reply)


def test_a_rewritten_model_changes_the_body() -> None:
    exchange = Stream(World(rewrite="m=longer").requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body())
    assert isinstance(reply, CommonResponse)
    assert reply.body is not None
    assert json.loads(reply.body)["model"] == "longer"
    assert dict(reply.set_headers)[b"content-length"] == b"%d" % len(reply.body)


class _Prefilled:
    """Another endpoint has computed the prompt."""

    applies = True

    def restrict(self, subset: frozenset[str] | None) -> frozenset[str] | None:
        return subset

    async def compute_prompt(self, request: PickRequest, gone: asyncio.Future[None] | None) -> None:
        request.transfer = b'{"remote_host":"h"}'


def test_a_prompt_that_was_computed_elsewhere_is_fetched_once() -> None:
    world = World()
    world.requests.relay.router.prefill = _Prefilled()
    for role, params, destinations in (("both", None, 2), ("decode", {"remote_host": "h"}, 1)):
        for endpoint in world.endpoints:
            endpoint.role = role  # type: ignore[assignment]
        exchange = Stream(world.requests)
        exchange.receive(head())
        (reply,) = exchange.receive(body())
        assert isinstance(reply, CommonResponse)
        sent = json.loads(BODY if reply.body is None else reply.body)
        assert sent.get("kv_transfer_params") == params
        addresses = dict(reply.set_headers)[b"x-gateway-destination-endpoint"].split(b",")
        assert len(addresses) == destinations


@pytest.mark.parametrize(
    ("world", "told", "data", "status", "code"),
    [
        (World(), head(), b"{", 400, 400),
        (World(limit=10), head(), BODY, 413, "too_large"),
        (World(key="secret"), head(), BODY, 401, "invalid_api_key"),
        (World(), head(metadata=EMPTY_SUBSET), BODY, 503, "none_ready"),
    ],
    ids=["bad body", "too large", "no key", "empty subset"],
)
def test_refusals(world: World, told: ProcessingRequest, data: bytes, status: int, code: object) -> None:
    exchange = Stream(world.requests)
    answers = exchange.receive(told)
    if not isinstance(answers[-1], ImmediateResponse):
        answers = exchange.receive(body(data))
    exchange.closed()
    (answer,) = answers
    assert isinstance(answer, ImmediateResponse)
    assert answer.status == status
    assert json.loads(answer.body)["error"]["code"] == code
    assert (b"retry-after" in dict(answer.headers)) is (status == 503)
    world.logged(status=status, upstream="", attempts=0)
    assert world.counts() == {"rejected": 1.0}


@pytest.mark.parametrize("path", [b"/sleep?level=1", b"/%61dmin/engines", b"/llm/pause"])
def test_administrative_routes_reach_no_endpoint(path: bytes) -> None:
    world = World()
    told = head(end=True)
    told.headers = [(b":method", b"POST"), (b":path", path)]
    [refusal] = Stream(world.requests).receive(told)
    assert isinstance(refusal, ImmediateResponse)
    assert refusal.status == 403
    assert json.loads(refusal.body)["error"]["code"] == "administrative"
    assert world.counts() == {"rejected": 1.0}


def test_a_subset_is_kept_to() -> None:
    hint = {
        "envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.2:8000", "10.9.9.9:1"]}
    }
    (reply,) = Stream(World().requests).receive(head(BodyMode.NONE, metadata=hint))
    assert isinstance(reply, CommonResponse)
    assert dict(reply.set_headers)[DESTINATIONS[0].encode()] == b"10.0.0.2:8000"


# -- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, "ok_without_usage"),
        ({"status": 404}, "client_error"),
        ({"status": 500}, "model_server_error"),
        ({"status": 413, "attempts": 0, "upstream": ""}, "rejected"),
        ({"flags": {"upstream_connection_termination"}}, "network_error"),
        ({"details": "upstream_reset_after_response_started{connection_termination}"}, "network_error"),
        ({"flags": {"upstream_request_timeout"}, "status": 504}, "network_error"),
        ({"flags": {"downstream_connection_termination", "local_reset"}}, "client_disconnect"),
        ({"details": "http2.remote_reset", "status": 200}, "client_disconnect"),
    ],
)
def test_the_log_names_the_outcome_once(fields: dict[str, Any], outcome: str) -> None:
    world = World()
    exchange = picked(world)
    assert world.endpoints[0].in_flight == 1
    exchange.closed()
    assert world.counts() == {}
    world.logged(**fields)
    world.logged(**fields)
    assert world.counts() == {outcome: 1.0}


@pytest.mark.parametrize(("own", "outcome"), [(True, "model_server_error"), (False, "client_error")])
def test_a_refused_key_is_the_fault_of_whose_it_is(own: bool, outcome: str) -> None:
    world = World()
    for endpoint in world.endpoints:
        endpoint.upstream.key_source = "--endpoint-api-key" if own else ""
    Stream(world.requests).receive(head(end=True))
    world.logged(status=401)
    assert world.counts() == {outcome: 1.0}
    assert world.endpoints[0].in_flight == world.metrics.running == 0


@pytest.mark.parametrize(
    ("method", "path", "ttft_s"),
    [
        (b"POST", b"/v1/audio/speech", 0.25),
        (b"GET", b"/v1/audio/speech", None),
        (b"POST", b"/v1/embeddings", None),
    ],
)
def test_what_is_only_read_or_a_vector_says_nothing_of_first_tokens(
    method: bytes, path: bytes, ttft_s: float | None
) -> None:
    world = World()
    told = head(BodyMode.NONE, end=True)
    told.headers = [(b":method", method), (b":path", path), (b"x-request-id", b"r")]
    exchange = Stream(world.requests)
    assert isinstance(exchange.receive(told)[0], CommonResponse)
    exchange.closed()
    world.logged(first_byte_s=0.25)
    assert world.endpoints[0].ttft_s == ttft_s


def test_those_tried_in_vain_have_failed() -> None:
    world = World()
    for _ in range(3):
        picked(world)
        world.logged(attempts=2, upstream="10.0.0.2:8000")
    assert not world.endpoints[0].breaker.closed
    assert world.endpoints[1].breaker.closed
    assert world.counts() == {"ok_without_usage": 3.0}


def test_busy_is_who_is_still_told_something() -> None:
    world = World()
    exchange = picked(world)
    assert world.requests.is_busy
    exchange.closed()
    assert not world.requests.is_busy  # nobody would tell
    world.requests.open_log_streams = 1
    assert world.requests.is_busy
    world.logged()
    assert not world.requests.is_busy


def test_an_id_may_come_twice() -> None:
    world = World()
    picked(world)
    picked(world)
    world.logged()
    assert world.metrics.running == 1
    world.logged()
    assert world.counts() == {"ok_without_usage": 2.0}


def test_an_entry_ends_the_request_whose_pick_it_repeats() -> None:
    """Clients choose request ids, also that of a request that runs."""
    world = World()
    first, second = picked_metadata(world), picked_metadata(world)
    world.logged(metadata=second)
    assert world.counts() == {"ok_without_usage": 1.0}
    world.logged(metadata=second)  # once more
    world.logged(status=429)  # of no pick: the gateway or Envoy has refused it
    assert world.counts() == {"ok_without_usage": 1.0}
    world.logged(metadata=first)
    assert world.counts() == {"ok_without_usage": 2.0}


def test_a_client_that_leaves_before_envoy_has_the_pick() -> None:
    world = World()
    exchange = Stream(world.requests)
    (first,) = exchange.receive(head())
    picked_metadata(world)
    exchange.receive(body())
    exchange.closed()
    world.logged(metadata=repeated(first), status=0, flags=frozenset({"downstream_connection_termination"}))
    assert world.counts() == {"client_disconnect": 1.0}
    assert world.metrics.running == 1


@pytest.mark.parametrize("log_first", [True, False])
def test_a_client_that_leaves_before_envoy_has_the_first_answer(log_first: bool) -> None:
    """Its entry has no metadata. Those of requests that Envoy refuses have none either."""
    world = World()
    world.logged(metadata=picked_metadata(world))
    running, left = Stream(world.requests), Stream(world.requests)
    for exchange in (running, left):
        exchange.receive(head(BodyMode.FULL_DUPLEX_STREAMED))
        assert len(exchange.receive(body())) == 2
    world.logged(status=400)
    assert world.metrics.running == 2
    if not log_first:
        left.closed()
    world.logged(status=0, flags=frozenset({"downstream_connection_termination"}))
    if log_first:
        left.closed()
    world.logged(status=400)
    assert world.counts() == {"ok_without_usage": 1.0, "client_disconnect": 1.0}
    assert world.metrics.running == 1


def test_a_reply_is_observed_for_the_request_whose_pick_it_repeats() -> None:
    world = World()
    first, second = picked_metadata(world), picked_metadata(world)
    observing = Stream(world.requests)
    told = ProcessingRequest(
        MessagePart.RESPONSE_HEADERS, [(b":status", b"200"), (b"content-type", b"text/event-stream")]
    )
    told.observing, told.attributes, told.metadata = True, {"request.id": "r"}, second
    observing.receive(told)
    observing.receive(ProcessingRequest(MessagePart.RESPONSE_BODY, body=STREAM + USAGE, end=True))
    world.logged(metadata=first)
    assert world.counts() == {"ok_without_usage": 1.0}
    world.logged(metadata=second)
    assert world.counts() == {"ok_without_usage": 1.0, "ok": 1.0}


def test_a_reply_whose_request_has_been_counted() -> None:
    world = World()
    exchange = picked(world)
    world.logged()
    answered(exchange, STREAM, USAGE)
    exchange.closed()
    assert world.counts() == {"ok_without_usage": 1.0}


def test_picks_of_another_process_are_counted_and_requests_without_picks_are_not() -> None:
    world = World()
    world.logged("unknown")
    assert world.counts() == {}
    world.logged("unknown", metadata=PICKED)
    assert world.counts() == {"ok_without_usage": 1.0}


def test_a_client_that_leaves_within_its_request() -> None:
    world = World()
    exchange = Stream(world.requests)
    exchange.receive(head())
    exchange.closed()
    assert world.counts() == {"client_disconnect": 1.0}


def test_a_failure_of_the_gateway_is_not_the_clients() -> None:
    world = World()
    exchange = Stream(world.requests)
    exchange.receive(head())
    exchange.failed()
    exchange.closed()
    assert world.counts() == {"rejected": 1.0}


def test_a_log_that_never_tells() -> None:
    world = World()
    picked(world)
    world.now += Timeouts().total + LOG_DELAY_S + 1
    world.requests.expire()
    assert world.counts() == {"network_error": 1.0}
    assert world.endpoints[0].in_flight == 0


# -- replies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [b"x", b"", b"2000", b"+20"])
def test_a_status_that_is_none(status: bytes) -> None:
    exchange = picked(World())
    with pytest.raises(MalformedMessageError, match=":status is"):
        exchange.receive(ProcessingRequest(MessagePart.RESPONSE_HEADERS, [(b":status", status)]))


def answered(exchange: ProcessorStream, *pieces: bytes) -> None:
    kind = (b"content-type", b"text/event-stream")
    told = ProcessingRequest(
        MessagePart.RESPONSE_HEADERS, [(b":status", b"200"), kind], response_mode=BodyMode.STREAMED
    )
    told.request_mode = BodyMode.BUFFERED
    assert exchange.receive(told) == [CommonResponse(MessagePart.RESPONSE_HEADERS)]
    for piece in pieces:
        assert exchange.receive(ProcessingRequest(MessagePart.RESPONSE_BODY, body=piece)) == [
            CommonResponse(MessagePart.RESPONSE_BODY)
        ]


@pytest.mark.parametrize("log_first", [True, False])
def test_a_reply_is_observed_to_its_end(log_first: bool) -> None:
    world = World()
    exchange = picked(world)
    answered(exchange, STREAM[:10], STREAM[10:], USAGE)
    if log_first:
        world.logged()
        assert world.counts() == {}
        exchange.closed()
    else:
        exchange.closed()
        assert world.counts() == {}
        world.logged()
    assert world.counts() == {"ok": 1.0}


@pytest.mark.parametrize(("end", "outcome"), [(USAGE, "ok"), (b"", "network_error")])
def test_without_a_log_the_reply_tells(end: bytes, outcome: str) -> None:
    world = World()
    exchange = picked(world)
    answered(exchange, STREAM, end)
    exchange.closed()
    world.requests.expire()
    assert world.counts() == {}  # the log may be late
    assert world.endpoints[0].in_flight == world.metrics.running == 0
    world.now += LOG_DELAY_S + 1
    world.requests.expire()
    assert world.counts() == {outcome: 1.0}
    world.logged(metadata={"envoy.lb": {PROCESS_KEY: [world.requests.process]}})
    assert world.counts() == {outcome: 1.0}


def test_another_filter_may_observe() -> None:
    """In observability mode nothing is answered; the request's id comes as an attribute."""
    world = World()
    picked(world).closed()
    observing = Stream(world.requests)
    told = ProcessingRequest(
        MessagePart.RESPONSE_HEADERS, [(b":status", b"200"), (b"content-type", b"text/event-stream")]
    )
    told.observing, told.attributes = True, {"request.id": "r"}
    assert observing.receive(told) == []
    assert (
        observing.receive(
            ProcessingRequest(MessagePart.RESPONSE_BODY, body=STREAM + USAGE, end=True, observing=True)
        )
        == []
    )
    world.logged()
    assert world.counts() == {"ok": 1.0}
    observing.closed()
    assert world.counts() == {"ok": 1.0}


def test_the_server_that_answered_is_the_one_that_is_told() -> None:
    world = World()
    exchange = picked(world)
    told = ProcessingRequest(MessagePart.RESPONSE_HEADERS, [(b":status", b"500")], end=True)
    told.metadata = {"envoy.lb": {"x-gateway-destination-endpoint-served": ["10.0.0.2:8000"]}}
    exchange.receive(told)
    exchange.closed()
    world.logged(status=500, upstream="10.0.0.2:8000")
    assert world.counts() == {"model_server_error": 1.0}
    assert world.endpoints[1].breaker._failures == 1
    assert world.endpoints[0].breaker._failures == 0


# -- stored responses


ID = "resp_" + "0123456789ab" * 3
CREATED = b'data: {"type":"response.created","response":{"id":"%b","usage":null}}\n\n' % ID.encode()


def about(world: World, id: str) -> list[Any]:
    """The answers to a request for a stored response."""
    exchange = Stream(world.requests)
    first = head(end=True)
    first.headers[:2] = [(b":method", b"GET"), (b":path", f"/v1/responses/{id}".encode())]
    answers = asyncio.run(exchange.stream.receive(first))
    exchange.closed()
    return list(answers)


def test_a_response_is_found_where_envoy_says_it_was_made() -> None:
    world = World()
    exchange = Stream(world.requests)
    first = head()
    first.headers[1] = (b":path", b"/v1/responses")
    exchange.receive(first)
    exchange.receive(body(json.dumps({"model": "m", "input": "p", "stream": True}).encode()))
    exchange.receive(
        ProcessingRequest(
            MessagePart.RESPONSE_HEADERS,
            [(b":status", b"200"), (b"content-type", b"text/event-stream")],
            metadata={"envoy.lb": {"x-gateway-destination-endpoint-served": ["10.0.0.2:8000"]}},
        )
    )
    exchange.receive(ProcessingRequest(MessagePart.RESPONSE_BODY, body=CREATED))
    (reply,) = about(world, ID)
    assert dict(reply.set_headers)[DESTINATIONS[0].encode()] == b"10.0.0.2:8000"


@pytest.mark.parametrize(
    ("statuses", "status", "destination"),
    [
        ({1: 404, 2: 200}, None, b"10.0.0.2:8000"),
        ({1: 200, 2: 404}, None, b"10.0.0.1:8000"),
        ({1: 404, 2: 405}, 404, None),
        ({1: 404, 2: 0}, 503, None),
        ({1: 500, 2: 404}, 503, None),
        ({1: 404, 2: 401}, None, b"10.0.0.2:8000"),
    ],
)
def test_endpoints_are_asked_for_an_unknown_response(
    monkeypatch: pytest.MonkeyPatch,
    statuses: dict[int, int],
    status: int | None,
    destination: bytes | None,
) -> None:
    async def answer(search: ResponseSearch, endpoint: Endpoint, request: UpstreamRequest, id: str) -> int:
        assert id == ID
        assert (request.method, request.target) == (b"GET", f"/v1/responses/{ID}".encode())
        assert not any(name.startswith(b":") for name, _ in request.headers)
        return next(value for number, value in statuses.items() if f"10.0.0.{number}:" in endpoint.url)

    monkeypatch.setattr(ResponseSearch, "_status", answer)
    (reply,) = about(World(), ID)
    if status is None:
        assert dict(reply.set_headers)[DESTINATIONS[0].encode()] == destination
    else:
        assert isinstance(reply, ImmediateResponse)
        assert reply.status == status


def test_errors_of_messages_have_their_shape() -> None:
    exchange = Stream(World(key="k").requests)
    first = head()
    first.headers[1] = (b":path", b"/v1/messages")
    (reply,) = exchange.receive(first)
    assert isinstance(reply, ImmediateResponse)
    error = json.loads(reply.body)
    assert (error["type"], error["error"]["type"], error["request_id"]) == (
        "error",
        "authentication_error",
        "r",
    )


def test_bodies_are_bounded_together_and_the_largest_that_is_incomplete_is_refused() -> None:
    world = World()
    world.requests.budget = ReceiveBudget(1000)
    large, small, done = Stream(world.requests), Stream(world.requests), Stream(world.requests)
    for exchange in (large, small, done):
        exchange.receive(head(BodyMode.FULL_DUPLEX_STREAMED))
    assert large.receive(body(b" " * 700, end=False)) == []
    assert small.receive(body(b" " * 200, end=False)) == []
    assert isinstance(done.receive(body())[0], CommonResponse)
    assert world.requests.budget.held == 900
    assert small.receive(body(b" " * 200, end=False)) == []
    (refusal,) = large.receive(body(b" ", end=False))
    assert isinstance(refusal, ImmediateResponse)
    assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (503, "too_many_bytes")
    assert isinstance(small.receive(body())[0], CommonResponse)
    large.closed()
    left = Stream(world.requests)
    left.receive(head(BodyMode.FULL_DUPLEX_STREAMED))
    left.receive(body(b" " * 200, end=False))
    left.closed()
    assert world.requests.budget.held == 0


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/embeddings", b"/v1/files"])
def test_servers_are_asked_not_to_code_what_the_gateway_reads(path: bytes) -> None:
    exchange, asked = Stream(World().requests), head(end=True)
    asked.headers[1:2] = [(b":path", path), (b"accept-encoding", b"gzip, br")]
    (reply,) = exchange.receive(asked)
    assert isinstance(reply, CommonResponse)
    assert ((b"accept-encoding", b"identity") in reply.set_headers) is (path != b"/v1/files")
