"""Every way a request can fail, with a real server behind a real gateway: one outcome, nothing remains."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, gateway, three_in_a_row
from tests.integration.server import SYNTHETIC, Server, data_of, wait_until
from tests.integration.test_connections import connect, request
from tests.integration.test_disconnect import read_to_the_end
from tests.integration.test_resumption import engines_up

SHORT: dict[str, Any] = {"model": "m", "max_tokens": 5, "ignore_eos": True, "stream": True}
LONG = SHORT | {"max_tokens": 1900}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
}
"""Path to what a request there needs besides."""
dialects = pytest.mark.parametrize("path", DIALECTS, ids=["completions", "chat"])


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose streams can be met in the middle, and end with their engine."""
    options = (
        *(*SYNTHETIC, "--synthetic-step-ms", "10", "--resume-timeout", "0"),
        "--no-allow-loopback-admin",
    )
    with Server(*options, directory=tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(scope="module")
def front(paced: Server) -> Iterator[Gateway]:
    """Of one endpoint, so that nothing is retried."""
    with gateway(paced.url) as running:
        yield running


def tokens_in(stream: str) -> int:
    """Events with text."""
    return len(re.findall(r'"(?:text|content)":"(?!")', stream))


class Asked:
    """A request in a thread of its own."""

    def __init__(self, front: Gateway, path: str, body: dict[str, Any]) -> None:
        self.status = 0
        self.text = ""
        self.begun = threading.Event()
        """A token has come, or the end."""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(front.url + path, body | DIALECTS[path]))
        self._thread.start()

    def _run(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url, json=body, timeout=2 * WAIT_S) as reply:
                self.status = reply.status_code
                for piece in reply.iter_text():
                    self.text += piece
                    if not self.begun.is_set() and self.tokens:
                        self.begun.set()
                    if self._leaving.is_set():
                        return
        finally:
            self.begun.set()

    @property
    def tokens(self) -> int:
        return tokens_in(self.text)

    def leave(self) -> None:
        """With the next piece."""
        self._leaving.set()
        self.end()

    def end(self) -> None:
        self._thread.join(3 * WAIT_S)
        assert not self._thread.is_alive(), "the reply has no end"


@contextlib.contextmanager
def asked(front: Gateway, body: dict[str, Any]) -> Iterator[list[Asked]]:
    """A request in each dialect, all at once; they have ended behind it."""
    requests = [Asked(front, path, body) for path in DIALECTS]
    try:
        yield requests
    finally:
        for each in requests:
            each.end()


def begun(requests: Sequence[Asked]) -> None:
    """Waits until each reply has begun."""
    for each in requests:
        assert each.begun.wait(WAIT_S)
        assert each.tokens, each.text


@contextlib.contextmanager
def counted(front: Gateway, outcome: str, count: int = 1) -> Iterator[dict[str, float]]:
    """``count`` requests end so meanwhile, and none otherwise. Behind it there are the tokens counted, by
    kind and source."""
    tokens: dict[str, float] = {}
    before, tokens_before = front.counts(), front.counts("tokens_total")
    yield tokens
    wanted = before | {outcome: before.get(outcome, 0.0) + count}
    wait_until(lambda: sum(front.counts().values()) >= sum(wanted.values()), WAIT_S, "counting the outcome")
    assert front.counts() == wanted
    wait_until(lambda: front.counts("requests_in_flight") == {"": 0.0}, WAIT_S, "the end of the requests")
    wait_until(lambda: set(front.counts("endpoint_in_flight").values()) == {0.0}, WAIT_S, "their end there")
    for name, value in front.counts("tokens_total").items():
        if more := value - tokens_before.get(name, 0.0):
            tokens[name] = more


@contextlib.contextmanager
def cancelled(server: Server, count: int) -> Iterator[None]:
    """The server hears of so many requests that nobody wants their replies any more."""

    def aborted() -> float:
        return server.metric("penstock:requests_total", outcome="abort")

    before = aborted()
    yield
    wait_until(lambda: aborted() >= before + count, WAIT_S, "cancelling the requests")


def nothing_remains(server: Server) -> None:
    wait_until(lambda: server.metric("penstock:streams") == 0, WAIT_S, "forgetting the streams")
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, WAIT_S, "freeing the slots")


def well(front: Gateway) -> None:
    """Three requests, so that what other tests have broken does not count."""

    def goes_well() -> bool:
        reply = front.client.post(
            "/v1/completions", json=SHORT | DIALECTS["/v1/completions"] | {"max_tokens": 1}
        )
        return reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")

    three_in_a_row(goes_well)


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@dialects
def test_whole_replies(paced: Server, front: Gateway, path: str) -> None:
    well(front)
    body = DIALECTS[path] | SHORT
    with counted(front, "ok", 2) as tokens:
        events = data_of(front.client.post(path, json=body).text)
        assert front.client.post(path, json=body | {"stream": False}).json()["usage"]
    assert events[-1] == "[DONE]"
    assert not any("usage" in event for event in events), "it was taken out again"
    assert tokens["output,usage"] == 10
    nothing_remains(paced)


# -- the server breaks


@pytest.mark.parametrize(
    ("part", "outcome", "code"),
    [
        pytest.param("engine", "model_server_error", "engine_died", id="the server sends error events"),
        pytest.param("api-server", "network_error", "upstream_broken", id="the gateway tells clients"),
    ],
)
def test_a_part_is_killed_within_streams(
    paced: Server, front: Gateway, part: str, outcome: str, code: str
) -> None:
    """Within a 200, whichever part it is."""
    well(front)
    with counted(front, outcome, 2) as tokens:
        with asked(front, LONG) as requests:
            begun(requests)
            paced.children(part)[0].kill()
        for each in requests:
            assert each.status == 200
            assert f'"code":"{code}"' in data_of(each.text)[-1]
    assert tokens == {"output,events": sum(each.tokens for each in requests)}
    engines_up(paced, 1)
    well(front)
    nothing_remains(paced)


def test_no_engine_is_there(paced: Server, front: Gateway) -> None:
    """The server answers 503, and there is nobody else to ask."""
    well(front)
    with stopped([psutil.Process(paced.process.pid)]):  # which would start another one
        paced.children("engine")[0].kill()
        wait_until(lambda: paced.metric("penstock:engine_up") == 0, WAIT_S, "noticing its end")
        with counted(front, "model_server_error") as tokens:
            reply = front.client.post("/v1/completions", json=SHORT | DIALECTS["/v1/completions"])
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_engine")
    assert not tokens
    engines_up(paced, 1)


def test_a_server_fails_and_is_gone(tmp_path: Path) -> None:
    options = (*SYNTHETIC, "--synthetic-fault", "stream-error@0")
    with Server(*options, directory=tmp_path) as server, gateway(server.url) as front:
        body = SHORT | DIALECTS["/v1/completions"]
        with counted(front, "model_server_error") as tokens:
            reply = front.client.post("/v1/completions", json=body | {"stream": False})
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_error")
        nothing_remains(server)
        server.end()
        with counted(front, "network_error"):
            reply = front.client.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_failed")
        assert not tokens


# -- the server stalls


def test_no_first_token_comes(paced: Server) -> None:
    """The engine is stopped; its API server takes requests, and hears that the gateway has given up."""
    options = ("--first-token-timeout", "1")
    with gateway(paced.url, options=options) as front, counted(front, "network_error", 2) as tokens:
        with stopped(paced.children("engine")), cancelled(paced, 2), asked(front, LONG) as requests:
            for each in requests:
                each.end()
        for each in requests:
            assert each.status == 504
            assert "no token came within 1 s" in each.text
    assert not tokens
    nothing_remains(paced)


@pytest.mark.parametrize("role", ["engine", pytest.param("api-server", marks=pytest.mark.slow)])
def test_streams_stop_between_events(paced: Server, role: str) -> None:
    options = ("--event-timeout", "1")
    with gateway(paced.url, options=options) as front, counted(front, "network_error", 2) as tokens:
        with cancelled(paced, 2), asked(front, LONG) as requests:
            begun(requests)
            with stopped(paced.children(role)):
                for each in requests:
                    each.end()
        for each in requests:
            assert each.status == 200
            assert "nothing came for 1 s" in data_of(each.text)[-1]
    assert tokens == {"output,events": sum(each.tokens for each in requests)}
    nothing_remains(paced)


@pytest.mark.slow
def test_an_api_server_takes_connections_only(paced: Server) -> None:
    """It is stopped: connections are made by its kernel, and nothing answers."""
    options = ("--first-token-timeout", "1")
    with gateway(paced.url, options=options) as front, counted(front, "network_error", 2) as tokens:
        with stopped(paced.children("api-server")), asked(front, LONG) as requests:
            for each in requests:
                each.end()
        assert {each.status for each in requests} == {504}
    assert not tokens
    nothing_remains(paced)


# -- the client leaves


def test_clients_leave_before_the_first_token(paced: Server, front: Gateway) -> None:
    well(front)
    url = httpx.URL(front.url)
    with (
        counted(front, "client_disconnect", 2) as tokens,
        stopped(paced.children("engine")),
        cancelled(paced, 2),
        contextlib.ExitStack() as stack,
    ):
        for path, body in DIALECTS.items():
            sock = stack.enter_context(socket.create_connection((url.host, url.port or 80)))
            sock.sendall(request(LONG | body, path))
        wait_until(lambda: paced.metric("penstock:streams") == 2, WAIT_S, "starting the streams")
    assert not tokens
    nothing_remains(paced)


def test_clients_leave_within_streams(paced: Server, front: Gateway) -> None:
    well(front)
    with counted(front, "client_disconnect", 2) as tokens:
        with cancelled(paced, 2), asked(front, LONG) as requests:
            begun(requests)
            for each in requests:
                each.leave()
        nothing_remains(paced)
    assert tokens["output,events"] >= sum(each.tokens for each in requests)
    assert set(tokens) == {"output,events"}


# -- what comes is broken: replies of the server, changed on their way


def reply_of(server: Server, call: Call) -> bytes:
    """The server's reply to a request, head and body as they are on the wire."""
    with connect(server) as connection:
        whole = request(call.json, call.path)
        connection.sendall(whole.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        return b"".join(read_to_the_end(connection))


@pytest.fixture(scope="module")
def wire(paced: Server) -> Iterator[Upstream]:
    """Between a gateway and the server."""
    with Upstream(lambda call: call.reply(500, b"{}")) as running:
        yield running


@pytest.fixture(scope="module")
def behind_wire(wire: Upstream) -> Iterator[Gateway]:
    with gateway(wire) as running:
        yield running


Change = Callable[[Call, bytes], None]
"""Sends a reply of the server's, as a broken one."""


def change_replies(paced: Server, wire: Upstream, front: Gateway, change: Change) -> None:
    """From here on; three have gone well before."""

    def passes(call: Call) -> None:
        call.send(reply_of(paced, call))
        call.connection.close()

    def changes(call: Call) -> None:
        change(call, reply_of(paced, call))
        call.connection.close()

    wire.behaviour = passes
    well(front)
    wire.behaviour = changes


def resets_at(where: Callable[[bytes], int]) -> Change:
    def change(call: Call, reply: bytes) -> None:
        call.send(reply[: where(reply)])
        call.reset()

    return change


PLACES: dict[str, tuple[Callable[[bytes], int], int]] = {
    "at once": (lambda reply: 0, 502),
    "within the head": (lambda reply: 30, 502),
    "behind the head": (lambda reply: reply.index(b"\r\n\r\n") + 4, 502),
    "within the first event": (lambda reply: reply.index(b"data: ") + 20, 502),
    "behind the first event": (lambda reply: reply.index(b"\n\n") + 2, 200),
    "in the middle": (lambda reply: reply.index(b"\n\n", len(reply) // 2) + 9, 200),
    "before the terminator": (lambda reply: reply.index(b"data: [DONE]"), 200),
}
"""Where a reply breaks to what its client gets: nothing is sent on before the first event is whole."""


@dialects
@pytest.mark.parametrize("place", PLACES)
def test_resets(paced: Server, wire: Upstream, behind_wire: Gateway, path: str, place: str) -> None:
    where, status = PLACES[place]
    change_replies(paced, wire, behind_wire, resets_at(where))
    with counted(behind_wire, "network_error") as tokens:
        reply = behind_wire.client.post(path, json=SHORT | DIALECTS[path])
        assert reply.status_code == status
        assert ('"code":"upstream_broken"' in reply.text) == (status == 200)
    if place == "before the terminator":
        assert tokens == {"input,usage": tokens["input,usage"], "output,usage": 5}, "usage had come"
    else:
        assert tokens.get("output,events", 0.0) == tokens_in(reply.text)


def replaces(old: bytes, new: bytes) -> Change:
    """Of the same length where it is within the body, so that chunks stay what they say."""

    def change(call: Call, reply: bytes) -> None:
        assert old in reply
        call.send(reply.replace(old, new))

    return change


@dialects
@pytest.mark.parametrize(
    "change",
    [
        replaces(b"charset=utf-8", b"charset=latin-1"),
        replaces(b"text/event-stream", b"text/plain"),
        replaces(b'"finish_reason":"length"', b'"finish_reason":"length '),
        replaces(b'"object":"', b'"\xfcbject":"'),
    ],
    ids=["says latin-1", "is no event stream", "truncated JSON", "bytes that are no UTF-8"],
)
def test_content(paced: Server, wire: Upstream, behind_wire: Gateway, path: str, change: Change) -> None:
    """It is passed on as it is; whether it can be used is the client's to know."""
    change_replies(paced, wire, behind_wire, change)
    with counted(behind_wire, "content_error"):
        reply = behind_wire.client.post(path, json=SHORT | DIALECTS[path])
        assert reply.status_code == 200
        assert reply.content.endswith(b"data: [DONE]\n\n")


@dialects
def test_half_a_reply(paced: Server, wire: Upstream, behind_wire: Gateway, path: str) -> None:
    """One that is not streamed, whole by its length but no JSON."""
    change_replies(paced, wire, behind_wire, replaces(b'"usage":{', b'"usage":,'))
    with counted(behind_wire, "content_error") as tokens:
        reply = behind_wire.client.post(path, json=SHORT | DIALECTS[path] | {"stream": False})
        assert reply.status_code == 200
    assert not tokens


def test_a_program_on_the_same_machine_may_stand_for_others(paced: Server) -> None:
    reply = paced.post("/sleep", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_local")
