"""Requests that name a stored response reach the server that has it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.gateway.processes import Call, Gateway, Upstream, closed_port, eventually, gateway

FIRST_TOKEN_S = 0.3
USAGE = '"usage":{"input_tokens":5,"output_tokens":2}'


@dataclass
class Store:
    """What one server, or several, keep."""

    id: str = field(default_factory=lambda: secrets.token_hex(6))
    responses: dict[str, str] = field(default_factory=dict)
    foreign: bool = False
    """Ids do not say which store they are of."""

    def new_id(self) -> str:
        return f"resp_{secrets.token_hex(16)}" if self.foreign else f"resp_{self.id}{secrets.token_hex(12)}"


class Server(Upstream):
    """A model server with a store."""

    def __init__(self, store: Store, port: int = 0) -> None:
        super().__init__(self._answer, port)
        self.store = store
        self.down = False
        """Connections break, as nobody listens for others."""

    def __exit__(self, *error: object) -> None:
        self.down = True
        super().__exit__(*error)

    def _answer(self, call: Call) -> None:
        if self.down:
            call.reset()
            return
        path, _, query = call.path.partition("?")
        if call.method == "POST" and path == "/v1/responses":
            self._create(call)
            return
        id = path.split("/")[3]
        if call.headers.get("authorization") == "Bearer wrong":
            call.reply(401, b'{"error":{"message":"wrong key"}}')
        elif id not in self.store.responses:
            call.reply(404, b'{"error":{"message":"not here"}}')
        elif "stream=true" in query:
            call.stream(*events(id, failed=self.store.responses[id] == "failed"))
        else:
            if call.method == "DELETE":
                del self.store.responses[id]
            call.reply(200, body(id).encode())

    def _create(self, call: Call) -> None:
        previous = call.json.get("previous_response_id")
        if previous is not None and previous not in self.store.responses:
            call.reply(404, b'{"error":{"message":"previous not here"}}')
            return
        id = self.store.new_id()
        self.store.responses[id] = "completed"
        if call.json.get("stream"):
            call.stream(*events(id))
        else:
            call.reply(200, body(id).encode())

    def count(self, method: str, path: str) -> int:
        return sum(call.method == method and call.path == path for call in self.calls)

    def mentions(self, id: str) -> int:
        """Calls that name it. Others may come at any time: a search's, after its answer."""
        return sum(id in call.path or id.encode() in call.body for call in self.calls)


def body(id: str) -> str:
    return f'{{"object":"response","id":"{id}","status":"completed","error":null,"output":[],{USAGE}}}'


def events(id: str, *, failed: bool = False) -> list[str]:
    last = body(id).replace('"error":null', '"error":{"code":"x","message":"m"}') if failed else body(id)
    kind = "failed" if failed else "completed"
    return [
        f'{{"type":"response.created","sequence_number":0,"response":{{"id":"{id}","usage":null}}}}',
        '{"type":"response.output_text.delta","delta":"Hi","sequence_number":1}',
        f'{{"type":"response.{kind}","sequence_number":2,"response":{last}}}',
    ]


def create(front: Gateway, **fields: Any) -> httpx.Response:
    return front.client.post("/v1/responses", json={"model": "m", "input": "p", **fields})


def create_at(server: Server) -> str:
    """As another gateway's client does. Returns the id."""
    id: str = httpx.post(f"{server.url}/v1/responses", json={"input": "p"}).json()["id"]
    return id


def get(front: Gateway, id: str, suffix: str = "") -> httpx.Response:
    return front.client.get(f"/v1/responses/{id}{suffix}")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Three that share nothing; the last one is of another make."""
    with ExitStack() as stack:
        yield [stack.enter_context(Server(Store(foreign=number == 2))) for number in range(3)]


@pytest.fixture(scope="module")
def front(servers: list[Server]) -> Iterator[Gateway]:
    with gateway(*servers) as running:
        yield running


@pytest.fixture(scope="module")
def another(servers: list[Server]) -> Iterator[Gateway]:
    """Which has relayed none of the responses that tests ask it for."""
    with gateway(*servers) as running:
        yield running


def owner(servers: list[Server], id: str) -> Server:
    [found] = [server for server in servers if id in server.store.responses]
    return found


def made_by_each(front: Gateway, servers: list[Server], **fields: Any) -> list[str]:
    """Ids of one response of each server."""
    by_server: dict[int, str] = {}
    while len(by_server) < len(servers):
        before = {id for server in servers for id in server.store.responses}
        assert create(front, **fields).status_code == 200
        [id] = {id for server in servers for id in server.store.responses} - before
        by_server[servers.index(owner(servers, id))] = id
    return [by_server[number] for number in range(len(servers))]


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_is_found_where_it_was_made(front: Gateway, servers: list[Server], stream: bool) -> None:
    for id, server in zip(made_by_each(front, servers, stream=stream), servers, strict=True):
        others = [each for each in servers if each is not server]
        assert get(front, id).json()["id"] == id
        assert get(front, id, "/input_items").status_code == 200
        assert front.client.post(f"/v1/responses/{id}/cancel").status_code == 200
        assert create(front, previous_response_id=id, stream=stream).status_code == 200
        item = f"msg_{id.removeprefix('resp_')}0001"
        if not server.store.foreign:
            create(front, input=[{"type": "item_reference", "id": item}])
            assert server.mentions(item) == 1
        assert front.client.delete(f"/v1/responses/{id}").status_code == 200
        assert get(front, id).status_code == 404
        assert [each.mentions(id) + each.mentions(item) for each in others] == [0, 0]


def test_another_gateway_asks_who_has_it(front: Gateway, another: Gateway, servers: list[Server]) -> None:
    for id, server in zip(made_by_each(front, servers), servers, strict=True):
        assert create(another, previous_response_id=id).status_code == 200
        assert get(another, id, "/input_items").status_code == 200
        # Requests of the search may still be under way to the others; they have no query.
        query = "?include=nothing"
        assert get(another, id, query).status_code == 200
        asked = [each for each in servers if each.count("GET", f"/v1/responses/{id}{query}")]
        assert asked == [server], "now it knows"


def test_of_a_known_store_nobody_is_asked(front: Gateway, servers: list[Server]) -> None:
    made_by_each(front, servers)
    id = servers[0].store.new_id()
    servers[0].store.responses[id] = "completed"  # by way of another gateway
    assert get(front, id).status_code == 200
    assert [each.count("GET", f"/v1/responses/{id}") for each in servers] == [1, 0, 0]


def test_a_response_that_nobody_has(front: Gateway, servers: list[Server]) -> None:
    id = f"resp_{'0' * 36}"
    reply = get(front, id)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "response_not_found"
    assert id in reply.json()["error"]["message"]
    reply = create(front, previous_response_id=id)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "previous_response_not_found"
    assert reply.json()["error"]["param"] == "previous_response_id"


def test_a_key_that_no_server_takes_is_said_by_a_server(front: Gateway) -> None:
    reply = front.client.get(f"/v1/responses/resp_{'1' * 36}", headers={"authorization": "Bearer wrong"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (401, "wrong key")


@pytest.mark.parametrize("status", [200, 501])
def test_a_server_without_responses_has_none(servers: list[Server], status: int) -> None:
    """Such as one with a page for every path, or that says that it implements no such route."""
    id = create_at(servers[2])
    page = b"<html>Page not found.</html>"
    with Upstream(lambda call: call.reply(status, page, "text/html")) as other:
        with gateway(other, servers[2]) as front:
            assert get(front, f"resp_{'0' * 36}").status_code == 404
            assert get(front, id).json()["id"] == id
        assert [call.path for call in other.calls][:1] == [f"/v1/responses/resp_{'0' * 36}"]


def test_routes_that_name_no_response(front: Gateway, servers: list[Server]) -> None:
    front.client.post("/v1/responses/input_tokens", json={"model": "m", "input": "p"})
    assert sum(each.count("POST", "/v1/responses/input_tokens") for each in servers) == 1


def test_a_stored_stream_is_not_counted_again(front: Gateway, servers: list[Server]) -> None:
    [id, *_] = made_by_each(front, servers, stream=True)
    before = front.counts("tokens_total"), front.counts()["ok"]
    for suffix in ("?stream=true", "?stream=true&starting_after=0"):
        assert "response.completed" in get(front, id, suffix).text
    owner(servers, id).store.responses[id] = "failed"
    assert "response.failed" in get(front, id, "?stream=true").text
    assert front.counts("tokens_total") == before[0]
    assert front.counts()["ok"] == before[1] + 3


def test_a_server_that_is_down_is_named() -> None:
    here, gone = Store(), Store()
    with Server(here) as server, ExitStack() as stack:
        lost = stack.enter_context(Server(gone))
        with gateway(server, lost) as front:
            made = made_by_each(front, [server, lost])
            stack.close()
            for reply in (get(front, made[1]), create(front, previous_response_id=made[1])):
                assert reply.status_code == 503
                assert reply.json()["error"]["code"] == "owner_unavailable"
                assert lost.url in reply.json()["error"]["message"]
            unknown = get(front, f"resp_{'2' * 36}")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "owner_unavailable")
            assert lost.url in unknown.json()["error"]["message"]
            assert get(front, made[0]).status_code == 200


def test_servers_that_share_a_store_stand_in_for_each_other() -> None:
    store = Store()
    with Server(store) as server, ExitStack() as stack:
        lost = stack.enter_context(Server(store))
        with gateway(server, lost) as front:
            id = ""
            while not lost.calls:
                create(front)
                id = list(store.responses)[-1]
            stack.close()
            assert get(front, id).status_code == 200
            assert create(front, previous_response_id=id).status_code == 200


def test_no_endpoint_can_be_asked() -> None:
    with gateway(closed_port(), closed_port()) as front:
        assert get(front, f"resp_{'3' * 36}").json()["error"]["code"] == "owner_unavailable"


@pytest.mark.parametrize("follows", [True, False])
def test_the_stream_of_a_cancelled_response_just_ends(follows: bool) -> None:
    """That is no failure of the server, nor of the stream: there is no error event."""

    def cancelled(call: Call) -> None:
        call.stream(*events("resp_1")[:2])

    with Upstream(cancelled) as server, gateway(server) as front:
        for _ in range(4):  # a breaker would open
            if follows:
                reply = get(front, "resp_1", "?stream=true&starting_after=0")
            else:
                reply = create(front, stream=True, background=True)
            assert reply.text == "".join(f"data: {event}\n\n" for event in events("resp_1")[:2])
        outcome = "ok" if follows else "ok_without_usage"
        eventually(lambda: front.counts() == {outcome: 4.0})
        assert "upstream_broken" in create(front, stream=True).text


def test_a_response_that_waits_in_the_background_may_take_its_time() -> None:
    """Who follows it gets comments meanwhile, and no token for longer than a new request may wait for one."""

    def follow(call: Call) -> None:
        first, *rest = events("resp_1")
        call.stream(first, end=False)
        deadline = time.monotonic() + 3 * FIRST_TOKEN_S
        while time.monotonic() < deadline:
            call.chunk(b": keep-alive\n\n")
            call.connection.settimeout(FIRST_TOKEN_S / 4)
            with suppress(TimeoutError):
                call.connection.recv(1)  # the gateway sends nothing
        for event in rest:
            call.chunk(f"data: {event}\n\n".encode())
        call.send(b"0\r\n\r\n")

    options = ("--first-token-timeout", str(FIRST_TOKEN_S), "--event-timeout", "30")
    with Upstream(follow) as server, gateway(server, options=options) as front:
        assert get(front, "resp_1", "?stream=true").text.endswith("}\n\n")
        eventually(lambda: front.counts() == {"ok": 1.0})
