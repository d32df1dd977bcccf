"""Nonsense gets a clear error in OpenAI's shape, and the server serves on."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import SYNTHETIC, Server
from tests.integration.test_connections import connect, read_until, request

IDLE = 10_000


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Small limits."""
    arguments = ("--max-request-bytes", "20000", "--strict-requests", "--header-timeout", "1")
    with Server(*SYNTHETIC, *arguments, directory=tmp_path_factory.mktemp("strict")) as running:
        yield running


def check(reply: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    """An error in OpenAI's shape whose message has the words."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ()),
        (b"{", ()),
        (b"[1, 2]", ()),
        (b'"text"', ()),
        (b'{"prompt": "x", "max_tokens": NaN}', ()),
        (b'{"prompt": "x", "temperature": "warm"}', ("temperature",)),
        (b'{"prompt": 5}', ("prompt",)),
        (b'{"prompt": "x", "stop": 5}', ("stop",)),
        (b'\xff\xfe{"prompt": "x"}', ()),
    ],
)
def test_bodies_that_are_not_requests(server: Server, body: bytes, words: tuple[str, ...]) -> None:
    headers = {"content-type": "application/json"}
    check(httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=30), 400, *words)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
        ("/v1/load_lora_adapter", "lora_name"),
        ("/v1/unload_lora_adapter", "lora_name"),
        ("/admin/adapters", "name"),
    ],
)
def test_a_value_of_another_type_is_the_same_error_at_every_route(
    server: Server, path: str, field: str
) -> None:
    """vLLM's, whose validation of bodies says so."""
    reply = server.post(path, {field: 5})
    check(reply, 400, f"{field}: expected ", param=f"body.{field}")
    assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == ("Bad Request", 400)


@pytest.mark.parametrize(
    ("options", "status", "words", "param"),
    [
        ({"model": "other"}, 404, ("other", "m"), "model"),
        ({"max_tokens": -1}, 400, ("max_tokens", "-1"), "max_tokens"),
        ({"max_tokens": 10**9}, 400, ("max_tokens",), "max_tokens"),
        ({"prompt": [3] * 5000}, 400, ("2048",), None),
        ({"prompt": "word " * 5000}, 400, ("2048",), None),
        ({"prompt": [10**8]}, 400, ("100000000",), None),
        ({"temperature": -1}, 400, ("temperature",), "temperature"),
        ({"top_p": 3}, 400, ("top_p",), "top_p"),
        ({"suffix": "x"}, 400, ("suffix",), "suffix"),
        ({"logit_bias": {"5": 1}}, 400, ("logit_bias", "synthetic"), None),
        ({"logit_bias": {"5": 1}, "stream": True}, 400, ("logit_bias", "synthetic"), None),
    ],
)
def test_values_out_of_range(
    server: Server, options: dict[str, Any], status: int, words: tuple[str, ...], param: str | None
) -> None:
    check(server.post("/v1/completions", {"prompt": "x"} | options), status, *words, param=param)


def test_routes_and_methods(server: Server) -> None:
    check(server.get("/v1/nothing"), 404, "/v1/nothing", "/v1/completions")
    refused = server.get("/v1/completions")
    check(refused, 405, "POST")
    assert refused.headers["allow"] == "POST"
    check(server.post("/v1/models", {}), 405, "GET")
    plain = httpx.post(
        f"{server.url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"}, timeout=30
    )
    check(plain, 400, "application/json", "text/plain")


def test_unknown_fields_are_counted_or_refused(server: Server, strict: Server) -> None:
    assert server.complete(max_tokens=1, surprise=1)["choices"]
    assert server.metric("penstock:unknown_request_fields_total") >= 1
    check(strict.post("/v1/completions", {"prompt": "x", "max_token": 1}), 400, "max_token", "max_tokens")


def test_bodies_over_the_limit(strict: Server) -> None:
    large = {"prompt": "x" * 30_000}
    check(strict.post("/v1/completions", large), 413, "20000")

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"x" * 1000

    headers = {"content-type": "application/json"}
    url = f"{strict.url}/v1/completions"
    check(httpx.post(url, content=pieces(), headers=headers, timeout=30), 413, "20000")
    assert strict.complete(max_tokens=1)["choices"]


@pytest.mark.parametrize(
    "sent", [b"GET /health HTTP/1.1\r\nHos", request({"prompt": "x"})[:-3]], ids=["headers", "body"]
)
def test_slow_senders_are_cut(strict: Server, sent: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent)
        data = b""
        while more := connection.recv(4096):
            data += more
    assert data.startswith(b"HTTP/1.1 408 ")
    assert b" 1 s (--header-timeout)" in data
    assert strict.complete(max_tokens=1)["choices"]


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/one\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of a TLS handshake
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_not_http(server: Server, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        data = read_until(connection, b"}}", 1)
        assert data.startswith(b"HTTP/1.1 400 ")
        assert connection.recv(10) == b""
    assert server.complete(max_tokens=1)["choices"]


def test_ten_thousand_idle_connections(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 1000:
        pytest.skip(f"the hard limit of descriptors is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections: list[socket.socket] = []
    try:
        with Server(*SYNTHETIC, directory=tmp_path) as server:
            connections += [connect(server) for _ in range(IDLE)]
            assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
            assert server.metric("penstock:connections") > IDLE
            with connections[-1] as used:
                used.sendall(request({"prompt": "x", "max_tokens": 2}))
                assert read_until(used, b"\r\n\r\n", 1).startswith(b"HTTP/1.1 200")
            assert "ERROR" not in server.log
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
