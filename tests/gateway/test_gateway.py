"""The gateway as a process, in front of servers that do what servers do."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.gateway.processes import WAIT_S, Behaviour, Call, Gateway, Upstream, eventually, gateway

TEXT = '{"choices":[{"index":0,"text":" a"}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
ERROR = '{"error":{"message":"engine gone","code":"engine_error"}}'
DONE = "[DONE]"
LATIN_1 = "text/event-stream; charset=latin-1"
REPLY = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def good(call: Call) -> None:
    """Streams with usage when asked for it, or answers whole."""
    if not call.json.get("stream"):
        call.reply(200, REPLY)
    elif (call.json.get("stream_options") or {}).get("include_usage"):
        call.stream(TEXT, TEXT, USAGE, DONE)
    else:
        call.stream(TEXT, TEXT, DONE)


def broken_stream(call: Call) -> None:
    """By the end of the connection: a reset may overtake what was sent before."""
    call.stream(TEXT, end=False)
    call.connection.shutdown(socket.SHUT_RDWR)


def cut_head(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\ncontent-")
    call.reset()


def stalled(call: Call) -> None:
    call.wait_until_gone()


def stalled_in_stream(call: Call) -> None:
    call.stream(TEXT, end=False)
    call.wait_until_gone()


def refused_by(front: Gateway, code: str) -> httpx.Response:
    """Asks until the gateway refuses with ``code``: between refusals it tries again how its endpoints are."""
    replies = []

    def refused() -> bool:
        replies.append(front.complete())
        return replies[-1].status_code != 200 and replies[-1].json()["error"].get("code") == code

    eventually(refused)
    return replies[-1]


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    """Of one endpoint, so that nothing is retried."""
    with gateway(upstream) as running:
        yield running


def outcome_of(front: Gateway, act: Callable[[], object]) -> str:
    """The one outcome that is counted while ``act`` runs and the request ends."""
    before = front.counts()
    act()
    after = before
    deadline = time.monotonic() + WAIT_S
    while sum(after.values()) == sum(before.values()):
        assert time.monotonic() < deadline, "no outcome was counted"
        after = front.counts()
    [(outcome, more)] = [
        (key, after[key] - before.get(key, 0.0)) for key in after if after[key] != before.get(key, 0.0)
    ]
    assert more == 1
    assert front.counts("requests_in_flight") == {"": 0.0}
    return outcome


@pytest.mark.parametrize(
    ("behaviour", "stream", "outcome", "status"),
    [
        (good, True, "ok", 200),
        (good, False, "ok", 200),
        (lambda call: call.reply(400, b'{"error":{"message":"no"}}'), True, "client_error", 400),
        (lambda call: call.reply(500, b"{}"), True, "model_server_error", 500),
        (lambda call: call.stream(TEXT, ERROR), True, "model_server_error", 200),
        (broken_stream, True, "network_error", 200),
        (cut_head, True, "network_error", 502),
        (lambda call: call.stream(TEXT), True, "network_error", 200),
        (lambda call: call.stream("{", DONE), True, "content_error", 200),
        (lambda call: call.reply(200, REPLY[:-9]), False, "content_error", 200),
        (lambda call: call.reply(200, REPLY, "text/html"), True, "content_error", 200),
        (lambda call: call.reply(200, b"{}", LATIN_1), True, "content_error", 200),
    ],
)
def test_outcomes(
    upstream: Upstream, front: Gateway, behaviour: Behaviour, stream: bool, outcome: str, status: int
) -> None:
    upstream.behaviour = behaviour
    got = []
    # so that failures of other cases do not count against the endpoint
    eventually(lambda: front.client.get("/ready").status_code == 200)
    assert outcome_of(front, lambda: got.append(front.complete(stream=stream))) == outcome
    assert got[0].status_code == status
    upstream.behaviour = good
    front.complete()


def test_a_stream_is_what_the_client_asked_for(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    assert front.complete().text == f"data: {TEXT}\n\ndata: {TEXT}\n\ndata: {DONE}\n\n"
    assert upstream.calls[-1].json["stream_options"] == {"include_usage": True}
    asked = front.complete(stream_options={"include_usage": True})
    assert USAGE in asked.text
    declined = front.complete(stream_options={"include_usage": False})
    assert upstream.calls[-1].json["stream_options"] == {"include_usage": False}
    assert USAGE not in declined.text


def test_a_broken_stream_ends_with_an_error_event(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = broken_stream
    text = front.complete().text
    assert text.startswith(f"data: {TEXT}\n\n")
    assert '\n\nevent: error\ndata: {"type":"error","error":{"message":"gateway: ' in text
    assert '"code":"upstream_broken"' in text
    assert DONE not in text
    upstream.behaviour = good
    front.complete()


@pytest.mark.parametrize("dialect", ["completions", "chat", "responses"])
def test_the_openai_client_raises_where_a_stream_breaks(
    upstream: Upstream, front: Gateway, dialect: str
) -> None:
    events = {
        "completions": TEXT,
        "chat": '{"choices":[{"index":0,"delta":{"content":"a"}}]}',
        "responses": '{"type":"response.output_text.delta","delta":"a"}',
    }

    def breaks(call: Call) -> None:
        call.stream(events[dialect], end=False)
        call.connection.shutdown(socket.SHUT_RDWR)

    upstream.behaviour = breaks
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        asks: dict[str, Callable[[], Iterator[object]]] = {
            "completions": lambda: client.completions.create(model="m", prompt="p", stream=True),
            "chat": lambda: client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "p"}], stream=True
            ),
            "responses": lambda: client.responses.create(model="m", input="p", stream=True),
        }
        stream = iter(asks[dialect]())
        assert next(stream)
        with pytest.raises(openai.APIError, match="the connection was closed"):
            next(stream)
    upstream.behaviour = good
    front.complete()


@pytest.mark.parametrize("behaviour", [stalled, stalled_in_stream])
def test_a_client_that_leaves(upstream: Upstream, front: Gateway, behaviour: Behaviour) -> None:
    upstream.behaviour = behaviour
    eventually(lambda: front.client.get("/ready").status_code == 200)
    count = len(upstream.calls)

    def leave() -> None:
        body = b'{"model":"m","prompt":"p","stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head + body)
            eventually(lambda: len(upstream.calls) > count)
            if behaviour is stalled_in_stream:
                assert sock.recv(4096)

    assert outcome_of(front, leave) == "client_disconnect"
    assert upstream.calls[-1].gone.wait(WAIT_S), "the model server is told"
    upstream.behaviour = good
    front.complete()


def test_other_requests_are_relayed_as_they_are(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = lambda call: call.reply(200, b"\x00audio", "audio/wav")
    reply = front.client.post(
        "/v1/audio?x=1", content=b"\xff", headers={"x-mine": "1", "connection": "close"}
    )
    assert (reply.content, reply.headers["content-type"]) == (b"\x00audio", "audio/wav")
    call = upstream.calls[-1]
    assert (call.path, call.body, call.headers["x-mine"]) == ("/v1/audio?x=1", b"\xff", "1")
    assert "connection" not in call.headers
    assert call.headers["via"] == "1.1 penstock"
    upstream.behaviour = good


@pytest.mark.parametrize(
    "path", ["/sleep?level=1", "/admin/engines/0/drain", "/%61dmin/engines", "/v1/load_lora_adapter"]
)
def test_administrative_requests_are_for_the_server_itself(
    upstream: Upstream, front: Gateway, path: str
) -> None:
    before = len(upstream.calls)
    reply = front.client.post(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "administrative")
    assert len(upstream.calls) == before


def raw_exchange(front: Gateway, request: bytes) -> bytes:
    """What comes until the gateway closes the connection."""
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
ONLY_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


@pytest.mark.parametrize(("method", "reply"), [("HEAD", ONLY_HEAD), ("DELETE", NO_CONTENT)])
def test_replies_without_a_body(upstream: Upstream, front: Gateway, method: str, reply: bytes) -> None:
    upstream.behaviour = lambda call: call.send(reply)
    request = f"{method} /v1/files/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
    head, _, body = raw_exchange(front, request.encode()).partition(b"\r\n\r\n")
    assert head.startswith(reply[:12])
    assert (b"content-length: 5" in head) == (method == "HEAD")
    assert b"transfer-encoding" not in head
    assert body == b""
    upstream.behaviour = good


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_of_http_1_0_gets_no_chunks(upstream: Upstream, front: Gateway, stream: str) -> None:
    upstream.behaviour = good
    asked = b'{"model":"m","prompt":"p","stream":%b}' % stream.encode()
    request = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(asked), asked)
    head, _, body = raw_exchange(front, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    streamed = f"data: {TEXT}\n\ndata: {TEXT}\n\ndata: {DONE}\n\n".encode()
    assert body == (streamed if stream == "true" else REPLY)


def test_a_client_that_waits_for_100_continue(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    asked = b'{"model":"m","prompt":"p"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\nconnection: close\r\n"
    reply = raw_exchange(front, head + b"content-length: %d\r\n\r\n%b" % (len(asked), asked))
    assert b" 200 OK" in reply
    assert reply.endswith(REPLY)
    assert "expect" not in upstream.calls[-1].headers


@pytest.mark.parametrize("given", [None, "mine"])
def test_request_ids(upstream: Upstream, front: Gateway, given: str | None) -> None:
    """In what is relayed and in the gateway's own errors."""
    upstream.behaviour = good
    headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    headers |= {} if given is None else {"x-request-id": given}
    reply = front.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, headers=headers)
    [request_id] = reply.headers.get_list("x-request-id")
    assert request_id == (given or request_id)
    assert len(request_id) == (16 if given is None else 4)
    sent = upstream.calls[-1].headers
    assert (sent["x-request-id"], sent["traceparent"]) == (request_id, headers["traceparent"])
    eventually(lambda: any(f'"request_id": "{request_id}"' in line for line in front.lines))
    refused = front.client.post("/v1/completions", content=b"{", headers=headers)
    assert refused.status_code == 400
    assert refused.headers["x-request-id"]
    assert (refused.headers["x-request-id"] == request_id) == (given is not None)


def test_the_id_of_the_server_stays(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = lambda call: call.send(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: theirs\r\n\r\n{}"
    )
    assert front.client.get("/v1/models").headers.get_list("x-request-id") == ["theirs"]
    upstream.behaviour = good


def test_half_a_request_goes_nowhere(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    count = len(upstream.calls)

    def leave() -> None:
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"POST /v1/files HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nhalf")

    assert outcome_of(front, leave) == "client_disconnect"
    assert len(upstream.calls) == count


def floods(call: Call) -> None:
    """Streams until the gateway hangs up."""
    call.stream(end=False)
    try:
        while True:
            call.chunk(f"data: {TEXT}\n\n".encode() * 1000)
    except OSError:
        call.gone.set()


def test_a_client_that_does_not_read_is_no_fault_of_the_server() -> None:
    body = {"model": "m", "prompt": "p", "stream": True}
    with (
        Upstream(floods) as server,
        gateway(server, options=("--event-timeout", "2")) as front,
        contextlib.ExitStack() as unread,
    ):
        for _ in range(4):  # more than would open the breaker
            reply = unread.enter_context(front.client.stream("POST", "/v1/completions", json=body))
            assert reply.status_code == 200
        for call in server.calls:
            assert call.gone.wait(WAIT_S)
        eventually(lambda: front.counts() == {"client_disconnect": 4})
        assert front.client.get("/ready").status_code == 200


def test_a_body_that_is_no_json_is_refused(front: Gateway) -> None:
    reply = front.client.post("/v1/completions", content=b"{")
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "bad_body"


# -- several endpoints


def refuses_usage(call: Call) -> None:
    if "stream_options" in call.json:
        call.reply(400, b'{"error":{"message":"stream_options is not known"}}')
    else:
        call.stream(TEXT, DONE)


def test_a_server_that_refuses_include_usage_is_remembered() -> None:
    with Upstream(refuses_usage) as server, gateway(server) as front:
        assert front.complete().text == f"data: {TEXT}\n\ndata: {DONE}\n\n"
        assert len(server.calls) == 2
        front.complete()
        assert len(server.calls) == 3
        assert front.counts() == {"ok_without_usage": 2}
        assert front.counts("tokens_total") == {"output,events": 2}


@pytest.mark.parametrize(
    "bad",
    [
        cut_head,
        lambda call: call.reset(),
        lambda call: call.reply(502, b"{}"),
        lambda call: call.reply(503, b"{}"),
        lambda call: call.reply(429, b"{}"),
    ],
)
def test_what_fails_before_the_first_byte_is_tried_elsewhere(bad: Behaviour) -> None:
    with Upstream(bad) as first, Upstream(good) as second, gateway(first, second) as front:
        replies = [front.complete() for _ in range(8)]
        while not first.calls:  # equal endpoints are picked at random
            replies.append(front.complete())
        assert {reply.status_code for reply in replies} == {200}
        assert front.counts() == {"ok": len(replies)}
        # a kept connection that breaks without a word is replaced, which is no retry
        assert 0 < front.counts("retry_total")[""] <= len(first.calls)


def test_a_server_that_stalls_is_replaced() -> None:
    options = ("--first-token-timeout", "1")
    with Upstream(stalled) as slow, Upstream(good) as other, gateway(slow, other, options=options) as front:

        def is_replaced() -> bool:
            calls = len(slow.calls)
            return front.complete().status_code == 200 and len(slow.calls) > calls

        eventually(is_replaced)
        assert front.counts("retry_total")[""] > 0


def test_a_server_that_is_not_there_is_not_noticed() -> None:
    with Upstream(good) as server, gateway(closed_port(), server) as front:
        assert {front.complete().status_code for _ in range(8)} == {200}


def test_nobody_is_there() -> None:
    with gateway(closed_port()) as front:
        assert front.complete().status_code == 502
        assert front.counts() == {"network_error": 1}
        for _ in range(2):
            front.complete()
        refused = refused_by(front, "none_ready")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        eventually(lambda: bool(refused_by(front, "none_ready")) and not is_ready(front))
        assert front.client.get("/health").status_code == 200, "it is alive"


def is_ready(front: Gateway) -> bool:
    return front.client.get("/ready").status_code == 200


def test_a_fast_failing_server_does_not_attract_traffic() -> None:
    with (
        Upstream(lambda call: call.reply(500, b"{}")) as bad,
        Upstream(good) as one,
        Upstream(good) as other,
        gateway(bad, one, other) as front,
    ):
        statuses = [front.complete().status_code for _ in range(60)]
        assert statuses.count(500) == len(bad.calls) <= 10
        assert set(statuses[-30:]) <= {200, 500}


def test_sessions_stay_and_models_are_rewritten() -> None:
    options = ("--scorers", "session=1", "--model-rewrite", "chat=small")
    with Upstream(good) as one, Upstream(good) as other, gateway(one, other, options=options) as front:
        for _ in range(10):
            front.client.post(
                "/v1/completions", json={"model": "chat", "prompt": "p"}, headers={"x-session-id": "s"}
            )
        assert sorted([len(one.calls), len(other.calls)]) == [0, 10]
        [served] = [server for server in (one, other) if server.calls]
        assert {call.json["model"] for call in served.calls} == {"small"}


def test_low_priority_is_shed_when_all_are_saturated() -> None:
    with Upstream(good) as full, gateway(full, options=("--scrape-interval", "0.05")) as front:
        full.metrics = b"vllm:num_requests_waiting 99\n"
        eventually(lambda: front.counts("endpoint_waiting") == {full.url: 99})
        refused = front.complete(priority=-1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "saturated"
        assert "retry-after" in refused.headers
        assert front.complete(priority=0).status_code == 200
        assert front.counts() == {"rejected": 1, "ok": 1}
        assert front.counts("rejection_total") == {"saturated": 1}


@pytest.mark.parametrize("status", [200, 401, 404, 501])
def test_a_server_that_tells_no_load_is_up(status: int) -> None:
    with Upstream(good) as server:
        scrapes: list[Call] = []

        def on_metrics(call: Call) -> None:
            scrapes.append(call)
            call.reply(status, b"nothing", "text/plain")

        server.on_metrics = on_metrics
        with gateway(server, options=("--scrape-interval", "0.05")) as front:
            eventually(lambda: len(scrapes) > 3)
            assert front.complete().status_code == 200
            assert front.counts("endpoint_up") == {server.url: 1}
            eventually(lambda: sum("tells no load" in line for line in front.lines) == 1)


def test_a_server_whose_metrics_fail_is_down() -> None:
    with Upstream(good) as server:
        server.on_metrics = lambda call: call.reply(503, b"loading", "text/plain")
        with gateway(server, options=("--scrape-interval", "0.05")) as front:
            eventually(lambda: front.counts("endpoint_up") == {server.url: 0})
            assert refused_by(front, "none_ready").status_code == 503


def test_loads_are_read_with_the_key() -> None:
    """A Penstock server with keys shows its metrics to those who have one."""
    with Upstream(good) as server:
        loaded = b"vllm:num_requests_waiting 7\n"
        server.on_metrics = lambda call: (
            call.reply(200, loaded)
            if call.headers.get("authorization") == "Bearer k"
            else call.reply(401, b"")
        )
        options = ("--scrape-interval", "0.05", "--endpoint-api-key", "k")
        with gateway(server, options=options) as front:
            eventually(lambda: front.counts("endpoint_waiting") == {server.url: 7})


def test_names_of_other_pickers() -> None:
    options = ("--metrics-compat", "llm-d", "--metrics-pool-name", "mine", "--model-rewrite", "m=small")
    with Upstream(good) as server, gateway(server, options=options) as front:
        front.complete()
        text = front.client.get("/metrics").text
    labels = 'fairness_id="default-flow",model_name="m",priority="0",target_model_name="small"'
    assert f"llm_d_epp_request_total{{{labels}}} 1.0" in text
    assert f"llm_d_epp_request_output_tokens_sum{{{labels}}} 2.0" in text
    assert 'llm_d_epp_ready_endpoints{name="mine"} 1.0' in text
    assert "llm_d_epp_scheduler_e2e_duration_seconds_count 1.0" in text
    assert 'penstock_gateway_request_total{model="m",outcome="ok",target_model="small"} 1.0' in text


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of Anthropic's clients\nother\n")
    options = ("--api-key", "k", "--api-key-file", str(file), "--endpoint-api-key", "upstream-key")
    with Upstream(good) as server, gateway(server, options=options) as front:
        assert front.complete().status_code == 401
        assert front.client.get("/health").status_code == 200
        assert front.client.get("/metrics").status_code == 401
        front.client.headers["authorization"] = "Bearer k"
        assert front.complete().status_code == 200
        assert server.calls[-1].headers["authorization"] == "Bearer upstream-key"
        del front.client.headers["authorization"]
        front.client.headers["x-api-key"] = "other"
        assert front.complete().status_code == 200
        assert server.calls[-1].headers["authorization"] == "Bearer upstream-key"
        assert "x-api-key" not in server.calls[-1].headers
        front.client.headers["authorization"] = "Bearer k"
        assert front.counts() == {"ok": 2, "rejected": 1}


def test_a_body_that_is_too_large() -> None:
    with Upstream(good) as server, gateway(server, options=("--max-request-bytes", "2000")) as front:
        refused = front.complete(prompt="p" * 2000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
        assert front.counts("rejection_total") == {"too_large": 1}
        assert not server.calls


def test_sigterm_drains() -> None:
    with Upstream(stalled_in_stream) as server, gateway(server) as front:
        with front.client.stream(
            "POST", "/v1/completions", json={"model": "m", "prompt": "p", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == f"data: {TEXT}"
            front.process.terminate()
            eventually(lambda: not is_ready(front))
            refused = httpx.post(front.url + "/v1/completions", json={"model": "m"}, timeout=WAIT_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
            assert front.client.get("/health").status_code == 200
            server.calls[-1].chunk(f"data: {DONE}\n\n".encode())
            server.calls[-1].send(b"0\r\n\r\n")
            assert f"data: {DONE}" in list(lines)
        assert front.process.wait(WAIT_S) == 0
