"""Responses over WebSocket, with openai's client and a foreign WebSocket client, at a real server."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from socket import create_connection
from socket import socket as TcpSocket
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from penstock.http.websocket.codec import Closed, Codec, Pong, Text
from penstock.http.websocket.codec import Event as WebSocketEvent
from tests.integration.server import SYNTHETIC, TLS, Server, total, wait_until

WAIT_S = 30.0
KEY = {"authorization": "Bearer mine"}
OTHER = {"authorization": "Bearer other"}
LIMIT = 100_000
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
Event = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--max-model-len", "100000", "--max-request-bytes", str(LIMIT))
    keys = ("--api-key", "mine", "--api-key", "other", "--allowed-origins", "https://app.example")
    with Server(*SYNTHETIC, *options, *keys, directory=tmp_path_factory.mktemp("sockets")) as running:
        yield running


def opened(server: Server, headers: dict[str, str] = KEY) -> AbstractContextManager[ClientConnection]:
    url = f"{server.url.replace('http', 'ws')}/v1/responses"
    return connect(url, additional_headers=headers, proxy=None, ping_interval=None, open_timeout=WAIT_S)


def create(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps({"type": "response.create", "input": "Hello", "max_output_tokens": 3} | fields))


def events(socket: ClientConnection) -> list[Event]:
    """The events of one response."""
    found: list[Event] = []
    while not found or found[-1]["type"] not in ENDS:
        found.append(json.loads(socket.recv(timeout=WAIT_S)))
    return found


def response(socket: ClientConnection, **fields: Any) -> Event:
    """The response at its end."""
    create(socket, **fields)
    last = events(socket)[-1]
    assert "response" in last, last
    ended: Event = last["response"]
    return ended


def error(socket: ClientConnection) -> Event:
    event: Event = json.loads(socket.recv(timeout=WAIT_S))
    assert event["type"] == "error", event
    return event


def test_turns_of_a_long_conversation_have_the_prompt_of_the_whole(server: Server) -> None:
    whole: list[Event] = []
    previous = None
    with opened(server) as socket:
        for turn in range(4):
            said = f"{turn} " + "some words " * (4000 if turn == 0 else 40)
            whole.append({"role": "user", "content": said})
            reply = response(socket, input=whole[-1:], previous_response_id=previous, store=False)
            body = {"input": whole, "max_output_tokens": 3, "store": False}
            sent = httpx.post(f"{server.url}/v1/responses", json=body, headers=KEY, timeout=WAIT_S)
            assert reply["usage"]["input_tokens"] == sent.json()["usage"]["input_tokens"] > 8_000
            whole += reply["output"]
            previous = reply["id"]


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_the_events_are_those_of_http(server: Server) -> None:
    body = {"input": "Count for me", "max_output_tokens": 20, "temperature": 0, "store": False}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="mine") as client:
        streamed = [event.to_dict() for event in client.responses.create(**body, model="m", stream=True)]
        with client.responses.connect() as connection:
            for _ in range(2):
                connection.response.create(**body, model="m")
                sent = []
                for event in connection:
                    sent.append(event.to_dict())
                    if event.type in ENDS:
                        break
                assert _comparable(sent) == _comparable(streamed)


def _comparable(stream: list[Any]) -> str:
    """Without what differs from one response to the next; deltas in a row are one, as a busy server sends."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    merged: list[Any] = []
    for event in ({**event, "sequence_number": 0} for event in stream):
        if merged and "delta" in event and merged[-1]["type"] == event["type"]:
            merged[-1]["delta"] += event["delta"]
        else:
            merged.append(event)
    stream = merged
    ids = {stream[0]["response"]["id"]: "ID"} | {
        event["item"]["id"]: "ITEM" for event in stream if "item" in event
    }
    text = json.dumps(stream)
    for id, name in ids.items():
        text = text.replace(id, name)
    times = {str(event["response"][name]) for event in stream if "response" in event for name in _TIMES}
    for time in times - {"None"}:
        text = text.replace(time, "TIME")
    return text


_TIMES = ("created_at", "completed_at")


def test_a_connection_continues_what_is_not_stored(server: Server) -> None:
    with opened(server) as socket:
        first = response(socket, store=False)
        second = response(socket, store=False, input="And?", previous_response_id=first["id"])
        third = response(socket, store=False, input="And?", previous_response_id=second["id"])
        counts = [each["usage"]["input_tokens"] for each in (first, second, third)]
        assert counts[0] < counts[1] < counts[2]
        whole = [{"role": "user", "content": "Hello"}, *first["output"], {"role": "user", "content": "And?"}]
        assert response(socket, input=whole)["usage"]["input_tokens"] == counts[1]
    with opened(server) as other:
        create(other, previous_response_id=second["id"])
        refused = error(other)
        assert (refused["status"], refused["error"]["code"]) == (404, "previous_response_not_found")


def test_a_later_connection_continues_what_is_stored(server: Server) -> None:
    with opened(server) as socket:
        stored = response(socket)
        unstored = response(socket, store=False, input="And?", previous_response_id=stored["id"])
        third = response(socket, store=True, input="And?", previous_response_id=unstored["id"])
    with opened(server) as socket:
        continued = response(socket, input="And?", previous_response_id=stored["id"])
        assert continued["usage"]["input_tokens"] == unstored["usage"]["input_tokens"]
        create(socket, previous_response_id=third["id"])  # what it continues is gone
        assert error(socket)["error"]["code"] == "previous_response_not_found"
    with opened(server, OTHER) as socket:
        create(socket, previous_response_id=stored["id"])
        assert error(socket)["status"] == 404


@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_prompt_is_prepared_without_output(server: Server, how: dict[str, Any]) -> None:
    with opened(server) as socket:
        prepared = response(socket, store=False, input="Read this. " * 50, **how)
        assert (prepared["status"], prepared["output"], prepared["usage"]["output_tokens"]) == (
            "completed",
            [],
            0,
        )
        after = response(socket, store=False, input=[], previous_response_id=prepared["id"])
        assert after["usage"]["input_tokens"] == prepared["usage"]["input_tokens"]
        assert after["output"]


def test_responses_run_one_after_the_other(server: Server) -> None:
    with opened(server) as socket:
        for number in range(40):
            create(socket, stream_id=f"lane {number}", max_output_tokens=2)
        for number in range(40):
            assert {event["stream_id"] for event in events(socket)} == {f"lane {number}"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ('{"type": "response.create", "input": 7}', "body.input"),
        ('{"type": "response.create", "input": "x", "background": true}', "background"),
        ('{"type": "response.steer"}', "type"),
        ("{}", "type"),
        ("[1]", "body"),
        ('{"type": "response.create", "input": "x", "stream_id": "%s"}' % ("x" * 257), "stream_id"),
        ('{"type": ', "body.9"),
    ],
)
def test_errors_name_the_field_and_the_connection_goes_on(server: Server, message: str, param: str) -> None:
    with opened(server) as socket:
        socket.send(message)
        refused = error(socket)
        assert (refused["status"], refused["error"]["param"]) == (400, param)
        assert refused["error"]["code"] is None
        assert response(socket)["output"]


def test_a_response_is_cancelled(server: Server) -> None:
    with opened(server) as socket:
        create(socket, max_output_tokens=50_000)
        first = json.loads(socket.recv(timeout=WAIT_S))
        socket.send('{"type": "response.cancel", "response_id": "resp_another"}')
        create(socket)
        socket.send(json.dumps({"type": "response.cancel", "response_id": first["response"]["id"]}))
        ended = events(socket)[-1]["response"]
        assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "abort"})
        assert ended["usage"]["output_tokens"] < 50_000
        assert events(socket)[-1]["response"]["id"] != first["response"]["id"]


def test_a_response_is_cancelled_before_it_begins(server: Server) -> None:
    """Its prompt is tokenized meanwhile."""
    with opened(server) as socket:
        create(socket, max_output_tokens=50_000, input="Hello " * 10_000)
        socket.send('{"type": "response.cancel"}')
        ended = events(socket)[-1]["response"]
        assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "abort"})
        assert response(socket)["status"] == "incomplete"


class OverHttp2:
    """A WebSocket on a stream of an HTTP/2 connection, with h2."""

    def __init__(self, server: Server, connection: TcpSocket, path: str = "/v1/responses") -> None:
        self.socket, self.h2 = connection, H2Connection()
        self.codec = Codec(client=True, max_bytes=1 << 20)
        self.status, self.ended = "", False
        self.got: list[WebSocketEvent] = []
        self.h2.initiate_connection()
        self.read_until(lambda: self.h2.remote_settings.enable_connect_protocol == 1)
        head = {":method": "CONNECT", ":protocol": "websocket", ":scheme": "http", ":path": path}
        head |= {":authority": urlsplit(server.url).netloc, "sec-websocket-version": "13", **KEY}
        self.h2.send_headers(1, list(head.items()))

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.socket.sendall(self.h2.data_to_send())
            for event in self.h2.receive_data(self.socket.recv(65536)):
                if isinstance(event, ResponseReceived):
                    self.status = dict(event.headers)[b":status"].decode()
                elif isinstance(event, DataReceived) and self.status == "200":
                    self.h2.acknowledge_received_data(event.flow_controlled_length, 1)
                    self.codec.receive(event.data)
                    self.got += self.codec.events()
                elif isinstance(event, StreamEnded):
                    self.ended = True
        self.socket.sendall(self.h2.data_to_send())

    def messages(self) -> list[Event]:
        return [json.loads(event.data) for event in self.got if isinstance(event, Text)]


def test_over_http2(server: Server) -> None:
    parts = urlsplit(server.url)
    with create_connection((parts.hostname, parts.port), timeout=WAIT_S) as connection:
        client = OverHttp2(server, connection)
        for number in range(1, 3):
            body = {"type": "response.create", "input": "x" * 20_000, "max_output_tokens": 30}
            message = client.codec.text(json.dumps(body).encode())
            for start in range(0, len(message), 16_000):
                client.h2.send_data(1, message[start : start + 16_000])
            client.read_until(
                lambda: sum(event["type"] in ENDS for event in client.messages()) == number  # noqa: B023
            )
        assert client.status == "200"
        assert [event["type"] for event in client.messages()].count("response.incomplete") == 2
        client.h2.send_data(1, client.codec.ping(b"?") + client.codec.close(1000))
        client.read_until(lambda: client.ended)
        assert client.got[-2:] == [Pong(b"?"), Closed(1000, "")]


def test_over_http2_no_other_route_is_a_websocket_and_a_reset_ends_what_runs(server: Server) -> None:
    parts = urlsplit(server.url)
    with create_connection((parts.hostname, parts.port), timeout=WAIT_S) as connection:
        other = OverHttp2(server, connection, path="/v1/models")
        other.read_until(lambda: bool(other.status))
        assert other.status == "405"
    with create_connection((parts.hostname, parts.port), timeout=WAIT_S) as connection:
        client = OverHttp2(server, connection)
        body = {"type": "response.create", "input": "x", "max_output_tokens": 50_000}
        client.h2.send_data(1, client.codec.text(json.dumps(body).encode()))
        client.read_until(lambda: len(client.got) > 4)
        client.h2.reset_stream(1)
        connection.sendall(client.h2.data_to_send())
        wait_until(lambda: _running(server) == 0, WAIT_S, "the end of the response")


def _running(server: Server) -> float:
    return total(server.metrics(**KEY), "vllm:num_requests_running")


def test_closing_ends_what_runs(server: Server) -> None:
    with opened(server) as socket:
        create(socket, max_output_tokens=50_000)
        socket.recv(timeout=WAIT_S)
    wait_until(lambda: _running(server) == 0, WAIT_S, "the end of the response")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (KEY | {"Origin": "https://elsewhere.example"}, 403),
    ],
)
def test_handshakes_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(server, headers):
        pass
    assert refused.value.response.status_code == status


def test_pages_of_this_server_and_of_allowed_origins_may_connect(server: Server) -> None:
    for origin in (server.url, "https://app.example"):
        with opened(server, KEY | {"Origin": origin}) as socket:
            assert socket.ping().wait(WAIT_S)


def test_a_plain_get_is_told_what_there_is(server: Server) -> None:
    reply = httpx.get(f"{server.url}/v1/responses", headers=KEY, timeout=WAIT_S, verify=TLS)
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize(
    ("opcode", "data", "code"),
    [
        (Opcode.TEXT, b"x" * (LIMIT + 1), 1009),
        (Opcode.BINARY, b"{}", 1003),
        (Opcode.TEXT, b"\xff", 1007),
        (Opcode.CONT, b"x", 1002),
    ],
)
def test_faults_have_their_close_codes(server: Server, opcode: Opcode, data: bytes, code: int) -> None:
    with opened(server) as socket:
        socket.socket.sendall(Frame(opcode, data).serialize(mask=True))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=WAIT_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code


def test_a_stored_conversation_outlives_its_api_server(server: Server) -> None:
    with opened(server) as socket:
        first = response(socket)
        server.children("api-server")[0].kill()
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=WAIT_S)
    wait_until(lambda: _is_ready(server), WAIT_S, "a new API server")
    with opened(server) as socket:
        second = response(socket, input="And?", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def _is_ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_that_ends_finishes_what_runs(server: Server) -> None:
    """The last test: the server ends."""
    with opened(server) as running, opened(server) as idle:
        create(running, max_output_tokens=300)
        running.recv(timeout=WAIT_S)
        server.process.send_signal(signal.SIGTERM)
        assert events(running)[-1]["response"]["usage"]["output_tokens"] == 300
        for socket in (running, idle):
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=WAIT_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
