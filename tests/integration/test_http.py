"""What surrounds a request: pages of other origins, request ids, a proxy's path, the access log, limits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import SYNTHETIC, Server, data_of, wait_until
from tests.integration.test_connections import connect, read_until, request

PAGE = "https://chat.example.com"
KEY = {"authorization": "Bearer k"}
OPTIONS = (
    *("--allowed-origins", PAGE),
    *("--root-path", "/llm"),
    "--enable-request-id-headers",
    *("--access-log", "all"),
    *("--max-header-bytes", "4096"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environ = os.environ | {"PENSTOCK_API_KEY": "k"}
    with Server(*SYNTHETIC, *OPTIONS, directory=tmp_path_factory.mktemp("http"), environ=environ) as running:
        yield running


def complete(server: Server, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    headers = KEY | options.pop("headers", {})
    return server.post(path, {"prompt": "x", "max_tokens": 3} | options, **headers)


def logged(server: Server, request_id: str) -> dict[str, str]:
    """The fields of a request's line in the log, once it is there."""
    wait_until(lambda: f"request_id={request_id} " in server.log, 60, "the line of the request")
    [line] = re.findall(rf".*INFO +api-server 0 +(request_id={request_id} .*)", server.log)
    return dict(field.split("=", 1) for field in line.split())


@pytest.mark.parametrize("stream", [False, True])
def test_pages_of_allowed_origins_may_read_every_kind_of_reply(server: Server, stream: bool) -> None:
    url = f"{server.url}/v1/completions"
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = httpx.options(url, headers=asked, timeout=30)  # a browser sends no key here
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    for reply in (
        complete(server, stream=stream, headers={"origin": PAGE}),
        complete(server, stream=stream, temperature=-1, headers={"origin": PAGE}),
        complete(server, stream=stream, headers={"origin": PAGE, "authorization": "none"}),
    ):
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["vary"] == "origin"
    stranger = complete(server, stream=stream, headers={"origin": "https://evil.example.com"})
    assert "access-control-allow-origin" not in stranger.headers
    refused = httpx.options(url, headers=asked | {"origin": "https://evil.example"}, timeout=30)
    assert refused.status_code == 403
    assert "--allowed-origins" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_id_is_the_replys_and_the_logs(server: Server, stream: bool) -> None:
    for given in (f"mine-{stream}", None):
        reply = complete(server, stream=stream, headers={} if given is None else {"x-request-id": given})
        name = reply.headers["x-request-id"]
        assert given in (None, name)
        assert f'"id":"cmpl-{name}"' in reply.text.replace('"id": "', '"id":"')
        fields = logged(server, f"cmpl-{name}")
        assert (fields["method"], fields["path"]) == ("POST", "/v1/completions")
        assert (fields["status"], fields["outcome"]) == ("200", "length")
        assert fields["output_tokens"] == "3"
    refused = complete(server, temperature=-1, headers={"x-request-id": f"bad-{stream}"})
    assert refused.headers["x-request-id"] == f"bad-{stream}"
    assert logged(server, f"bad-{stream}")["status"] == "400"


def test_a_client_that_leaves_is_told_from_one_that_was_served(server: Server) -> None:
    body = request({"prompt": "x", "max_tokens": 2000, "stream": True, "request_id": "left"})
    with connect(server) as connection:
        connection.sendall(body.replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer k"))
        read_until(connection, b"data: ", 2)
    fields = logged(server, "cmpl-left")
    assert (fields["status"], fields["outcome"]) == ("200", "abort")
    assert 0 < int(fields["output_tokens"]) < 2000


def test_a_client_that_leaves_within_its_request_is_no_error_of_it(server: Server) -> None:
    body = request({"prompt": "x" * 1000})
    with connect(server) as connection:
        keyed = b"Host: x\r\nAuthorization: Bearer k\r\nX-Request-Id: half"
        connection.sendall(body.replace(b"Host: x", keyed)[:-100])
    assert logged(server, "half")["status"] == "499"


def test_routes_answer_with_and_without_the_root_path(server: Server) -> None:
    assert complete(server, "/llm/v1/completions").status_code == 200
    assert data_of(complete(server, "/llm/v1/completions", stream=True).text)[-1] == "[DONE]"
    assert server.get("/llm/v1/models/m", **KEY).json()["id"] == "m"
    assert server.get("/llm/health").status_code == 200
    assert server.get("/llm/v1/models").status_code == 401
    assert server.get("/llmv1/models", **KEY).status_code == 404
    document = server.get("/llm/openapi.json", **KEY).json()
    assert document["servers"] == [{"url": "/llm"}]


def head(size: int, *, body: bytes = b"") -> bytes:
    """A request of three headers whose request line and headers have ``size`` bytes together."""
    start = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nX: " % len(body)
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n" + body


def test_heads_up_to_the_limit(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(head(4096, body=b"x" * 4096) + head(4096))
        assert read_until(connection, b"{}", 2).count(b"HTTP/1.1 200 OK") == 2
        connection.sendall(head(4097))
        refused = b""
        while more := connection.recv(4096):
            refused += more
    assert refused.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"--max-header-bytes" in refused
    wait_until(lambda: "status=431 refused=" in server.log, 90, "the line of the access log")
    counted = re.compile(r'requests_rejected_total{.*status="431".*} [1-9]')
    wait_until(lambda: counted.search(server.metrics(**KEY)), 90, "counting the refusal")


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX: y\r\n"])
def test_heads_without_end_are_cut_before_their_end(server: Server, start: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(start)
        received = b""
        try:
            while not received:
                connection.sendall(b"X: y\r\n" * 100 if start.endswith(b"\n") else b"x" * 600)
                connection.settimeout(0.05)
                try:
                    received = connection.recv(4096)
                except TimeoutError:
                    connection.settimeout(20)
        except ConnectionError:
            pass  # closed with unread bytes
        else:
            assert received.startswith(b"HTTP/1.1 431 ")
    assert server.get("/health").status_code == 200


def test_errors_alone_are_logged_when_asked_for(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, "--access-log", "errors", "--log-level", "error", directory=tmp_path) as server:
        server.complete(max_tokens=1, request_id="good")
        server.post(
            "/v1/completions", {"prompt": "x"}, **{"content-type": "text/plain", "x-request-id": "bad"}
        )
        assert logged(server, "bad")["status"] == "400"
        assert "good" not in server.log


def test_a_stream_that_fails_is_an_error_in_the_log_whatever_its_status(tmp_path: Path) -> None:
    fault = ("--access-log", "errors", "--synthetic-fault", "stream-error@5")
    with Server(*SYNTHETIC, *fault, directory=tmp_path) as server:
        body = {"prompt": "x", "max_tokens": 50, "stream": True, "request_id": "failed"}
        text = server.post("/v1/completions", body).text
        assert '"error"' in text
        fields = logged(server, "cmpl-failed")
        assert (fields["status"], fields["outcome"]) == ("200", "error")
        assert 0 < int(fields["output_tokens"]) < 50
