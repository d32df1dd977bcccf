"""Responses over WebSocket, with a real gateway between real sockets."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.processes import Call, Gateway, Upstream, eventually, gateway
from tests.gateway.websocket.sockets import (
    ClientSide,
    RefusedError,
    ServerSide,
    by_socket,
    logged,
    texts,
)


def good(side: ServerSide, fields: dict[str, Any]) -> None:
    side.respond(f"resp_{fields['input']}")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Upstream, Gateway]]:
    """A server, whose behaviour tests replace, and a gateway."""
    with Upstream(by_socket(good)) as server, gateway(server) as front:
        yield server, front


@pytest.fixture
def server(served: tuple[Upstream, Gateway]) -> Upstream:
    server, _ = served
    server.calls.clear()
    server.behaviour = by_socket(good)
    return server


@pytest.fixture
def front(served: tuple[Upstream, Gateway]) -> Gateway:
    return served[1]


def test_one_connection_several_responses(server: Upstream, front: Gateway) -> None:
    made: list[dict[str, Any]] = []
    server.behaviour = by_socket(good, made=made)
    before = front.counts().get("ok", 0.0)
    with ClientSide(front, x_request_id="turns") as client:
        for name in ("1", "2", "3"):
            events = client.create(input=name, temperature=0.5)
            assert [event["type"] for event in events] == [
                "response.created",
                *2 * ["response.output_text.delta"],
                "response.completed",
            ]
            assert texts(events) == "ab"
            assert events[-1]["response"]["id"] == f"resp_{name}"
        client.close()
    assert made[0] == {"type": "response.create", "model": "m", "input": "1", "temperature": 0.5}
    lines = logged(front, "turns", 3)
    assert [each["request_id"] for each in lines] == ["turns.1", "turns.2", "turns.3"]
    assert {each["outcome"] for each in lines} == {"ok"}
    assert {(each["input_tokens"], each["output_tokens"], each["token_events"]) for each in lines} == {
        (3, 2, 2)
    }
    assert all(each["ttft"] <= each["seconds"] and each["streamed"] for each in lines)
    upgrades = [call for call in server.calls if "upgrade" in call.headers]
    assert len(upgrades) == 1
    assert upgrades[0].headers["x-request-id"] == "turns"
    assert front.counts()["ok"] == before + 3


def test_payloads_are_relayed_untouched(server: Upstream, front: Gateway) -> None:
    """The bytes of both sides, however they are spelled."""
    asked = b'{ "input":"p", "type" : "response.create","model":"m", "stream_id":"a", "x": 1e2}'
    told = [
        b'{"response":{"id":"resp_1"}, "type":"response.created","stream_id":"a"}',
        b'{"type": "response.output_text.delta", "delta": "\\u00e9 \xc3\xa9","stream_id":"a"}',
        b'{"type":"response.other","big":"' + b"x" * 200_000 + b'","stream_id":"a"}',
        b'{"type":"response.completed",\n "response":{"id":"resp_1"},"stream_id":"a"}',
    ]
    got: list[bytes] = []

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        for each in told:
            side.send(each)

    def behave(call: Call) -> None:
        side = ServerSide(call)
        for message in side.messages():
            got.append(message)
            answer(side, {})

    server.behaviour = behave
    with ClientSide(front) as client:
        client.send(asked)
        assert [client.receive() for _ in told] == told
        assert got == [asked]


def test_errors_of_servers(server: Upstream, front: Gateway) -> None:
    """As a message without a stream, or in it; the server's status counts."""

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        if fields["input"] == "late":
            side.begin()
        if fields["input"] == "plain":
            side.send_json(type="error", code="server_error", message="out of memory", param=None)
            return
        error = {"type": "invalid_request_error", "code": "previous_response_not_found", "message": "no"}
        side.send_json(type="error", status=400, error=error)

    server.behaviour = by_socket(answer)
    with ClientSide(front, x_request_id="errors") as client:
        (first,) = client.create()
        assert (first["status"], first["error"]["code"]) == (400, "previous_response_not_found")
        created, last = client.create(input="late")
        assert (created["type"], last["error"]["message"]) == ("response.created", "no")
        (plain,) = client.create(input="plain")
        assert plain == {
            "type": "error",
            "status": 502,
            "error": {
                "type": "server_error",
                "code": "server_error",
                "message": "out of memory",
                "param": None,
            },
        }
        assert [each["outcome"] for each in logged(front, "errors", 3)] == [
            "client_error",
            *2 * ["model_server_error"],
        ]
        assert len(server.calls) == 1, "the connection goes on"


def test_servers_that_break(server: Upstream, front: Gateway) -> None:
    """Between responses nobody notices, within one the client gets an error."""
    made: list[dict[str, Any]] = []

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        if fields["input"] == "break":
            side.begin()
            side.delta()
            side.connection.shutdown(2)
        elif fields["input"] == "leave":
            side.respond()
            side.connection.sendall(side.codec.close(1012, "restarts"))
            side.connection.shutdown(2)  # what comes before the gateway knows is not read
        else:
            good(side, fields)

    server.behaviour = by_socket(answer, made=made)
    with ClientSide(front, x_request_id="breaks") as client:
        assert texts(client.create(input="leave")) == "ab"
        assert texts(client.create()) == "ab"
        assert len(server.calls) == 2
        events = client.create(input="break")
        assert texts(events) == "a"
        assert (events[-1]["status"], events[-1]["error"]["code"]) == (502, "upstream_broken")
        assert texts(client.create()) == "ab"
        assert len(server.calls) == 3
    assert [each["outcome"] for each in logged(front, "breaks", 4)] == ["ok", "ok", "network_error", "ok"]
    assert len(made) == 4, "nothing is sent twice"


def test_a_message_that_is_too_large_for_the_server(server: Upstream, front: Gateway) -> None:
    """The client's fault, as 413 over HTTP is, and another server would not take it either."""

    def small(side: ServerSide, fields: dict[str, Any]) -> None:
        side.connection.sendall(side.codec.close(1009, "A message is larger than 9 bytes."))

    server.behaviour = by_socket(small)
    with ClientSide(front, x_request_id="large") as client:
        (refused,) = client.create()
        assert (refused["status"], refused["error"]["code"]) == (413, "request_too_large")
        assert "A message is larger than 9 bytes." in refused["error"]["message"]
        server.behaviour = by_socket(good)
        assert texts(client.create()) == "ab"
    assert [each["outcome"] for each in logged(front, "large", 2)] == ["client_error", "ok"]


def test_a_cancel_of_what_has_not_reached_a_server(server: Upstream, front: Gateway) -> None:
    """It follows the message."""
    seen: list[dict[str, Any]] = []

    def cancelled(side: ServerSide, fields: dict[str, Any]) -> None:
        if fields["type"] == "response.cancel":
            side.complete()
        else:
            side.begin()

    server.behaviour = by_socket(cancelled, made=seen)
    with ClientSide(front) as client:
        client.begin()
        client.send_json(type="response.cancel")
        assert [event["type"] for event in client.rest()] == ["response.created", "response.completed"]
        client.begin(input="next")
        client.send_json(type="response.cancel")
        client.rest()
    assert [fields["type"] for fields in seen] == 2 * ["response.create", "response.cancel"]


def test_clients_that_leave(server: Upstream, front: Gateway) -> None:
    """What runs for them is cancelled at the server."""

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        side.begin()
        side.delta()

    server.behaviour = by_socket(answer)
    with ClientSide(front, x_request_id="leaves") as client:
        client.begin()
        while b"output_text.delta" not in (event := client.receive() or b""):
            assert event
    assert server.calls[0].gone.wait(30)
    (line,) = logged(front, "leaves", 1)
    assert line["outcome"] == "client_disconnect"
    assert line["token_events"] == 1


def test_lanes_run_at_the_same_time(server: Upstream, front: Gateway) -> None:
    """Responses of one lane in their order, others meanwhile."""

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        if fields["input"] == "slow":
            side.begin("resp_slow")
            return  # the rest never comes
        good(side, fields)

    server.behaviour = by_socket(answer)
    with ClientSide(front) as client:
        client.begin(input="slow", stream_id="one")
        assert client.receive() is not None
        client.begin(input="behind", stream_id="one")
        assert texts(client.create(input="x", stream_id="two")) == "ab"
        assert texts(client.create(input="y")) == "ab"
        for lane in range(20):
            client.begin(input="slow", stream_id=f"{lane}")
        assert any("too_many_streams" in str(client.receive()) for _ in range(20))


def test_messages_that_are_none(server: Upstream, front: Gateway) -> None:
    with ClientSide(front) as client:
        for sent, param in (
            (b"{", "body.1"),
            (b"[]", "body"),
            (b'{"type":"response.steer"}', "type"),
            (b'{"type":"response.create","stream_id":1}', "stream_id"),
            (b'{"type":"response.create","model":"m","model":"n"}', "model"),
        ):
            client.send(sent)
            (error,) = client.rest()
            assert (error["status"], error["error"].get("param")) == (400, param), sent
        assert texts(client.create()) == "ab"
        client.connection.sendall(b"\x82\x80\0\0\0\0")
        assert client.receive() is None
        assert client.closed is not None
        assert client.closed.code == 1003


def test_other_handshakes(server: Upstream, front: Gateway) -> None:
    with pytest.raises(RefusedError, match="501"):
        ClientSide(front, "/v1/realtime")
    with pytest.raises(RefusedError, match="403"):
        ClientSide(front, origin="https://elsewhere.example")
    with ClientSide(front, "//v1/responses/?x=1", origin="http://x") as client:
        assert texts(client.create()) == "ab"


def test_the_end_of_the_gateway() -> None:
    """What runs may end; connections on which nothing runs are closed."""
    go = threading.Event()

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        side.begin()
        go.wait(60)
        side.complete()

    with (
        Upstream(by_socket(answer)) as server,
        gateway(server) as front,
        ClientSide(front) as idle,
        ClientSide(front) as busy,
    ):
        busy.begin()
        assert busy.receive() is not None
        front.process.send_signal(signal.SIGTERM)
        eventually(lambda: any("draining" in line for line in front.lines))
        busy.begin()
        go.set()
        assert busy.rest()[-1]["type"] == "response.completed"
        (refused,) = busy.rest()
        assert refused["error"]["code"] == "draining"
        assert busy.receive() is None
        assert idle.receive() is None
        assert front.process.wait(60) == 0


def test_clients_that_read_slowly(server: Upstream, front: Gateway) -> None:
    """They hold back the server, and nothing else."""
    sent = threading.Event()

    def answer(side: ServerSide, fields: dict[str, Any]) -> None:
        much = fields["input"] == "much"
        side.begin()
        for _ in range(2000 if much else 2):
            side.delta("x" * 20_000)
        if much:
            sent.set()
        side.complete()

    server.behaviour = by_socket(answer)
    with ClientSide(front) as slow, ClientSide(front) as client:
        slow.begin(input="much")
        for _ in range(3):
            assert len(texts(client.create())) == 40_000
        assert not sent.wait(0.5), "40 MB are in nobody's memory"
        assert len(texts(slow.rest())) == 40_000_000
