"""Hostile requests against a running server: a bystander's stream goes on, and memory stays."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from penstock.config.serve import ServeConfig
from tests.hostile.bystander import Bystander, Gaps
from tests.integration.server import SYNTHETIC, Server

MEGABYTE = 1 << 20
HEADERS = {"content-type": "application/json"}
LONGEST_DELAY_S = 0.2
"""Of an event, beside what the machine delays a process that does nothing."""
MEMORY_MB = 250
LARGEST = ServeConfig(model="m").max_request_bytes - 1024
"""Bytes of a text with which a body is nearly as large as the server accepts."""
LINES = b"\\n" * (LARGEST // 2)
"""A text whose every character is escaped, which takes longest to decode."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*SYNTHETIC, directory=tmp_path_factory.mktemp("hostile")) as running:
        yield running


def processes_of(server: Server) -> list[psutil.Process]:
    """API servers and engines."""
    return server.children("api-server") + server.children("engine")


def memory_mb(server: Server) -> float:
    """Private memory."""
    return sum(float(process.memory_full_info().uss) for process in processes_of(server)) / MEGABYTE


def messages(count: int) -> bytes:
    return b'{"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * count) + b"]}"


ATTACKS: dict[str, tuple[str, Callable[[], bytes], set[int], str]] = {
    "a prompt without spaces": (
        "completions",
        lambda: json.dumps({"prompt": "a" * LARGEST}).encode(),
        {400},
        "at least",
    ),
    "lists": ("completions", lambda: b'{"prompt":"x","a":[' + b"[]," * 5_000_000 + b"0]}", {400}, "body"),
    "ids": ("completions", lambda: b'{"prompt":[' + b"1," * 1_000_000 + b"1]}", {400}, "at least"),
    "many messages": ("chat/completions", lambda: messages(15_000), {400}, "at least"),
    "a deep body": ("completions", lambda: b'{"prompt":' + b"[" * LARGEST, {400}, "body"),
    "a long model": (
        "completions",
        lambda: json.dumps({"prompt": "x", "model": "m" * LARGEST}).encode(),
        {404},
        "model",
    ),
    "a long schema": (
        "completions",
        lambda: json.dumps({"prompt": "x", "structured_outputs": {"json": {"a": "b" * LARGEST}}}).encode(),
        {400},
        "structured_outputs",
    ),
    "stop ids": (
        "completions",
        lambda: b'{"prompt":"x","stop_token_ids":[' + b"1," * 1_000_000 + b"1]}",
        {200, 400},
        "",
    ),
    "bias": (
        "completions",
        lambda: json.dumps({"prompt": "x", "logit_bias": {str(n): 1 for n in range(90_000)}}).encode(),
        {400},
        "logit_bias",
    ),
    "an escaped prompt": ("completions", lambda: b'{"prompt":"%b"}' % LINES, {400}, "at least"),
    "escaped prompts": (
        "completions",
        lambda: b'{"prompt":[%b]}' % b",".join([b'"%b"' % LINES[: LARGEST // 100 // 2 * 2]] * 99),
        {400},
        "at least",
    ),
    "an escaped message": (
        "chat/completions",
        lambda: b'{"messages":[{"role":"user","content":"%b"}]}' % LINES,
        {400},
        "at least",
    ),
    "characters by number": (
        "completions",
        lambda: b'{"prompt":"%b"}' % (b"\\u00e9" * (LARGEST // 6)),
        {400},
        "at least",
    ),
    "a long user": ("completions", lambda: b'{"prompt":"x","max_tokens":1,"user":"%b"}' % LINES, {200}, ""),
    "a long unknown field": (
        "completions",
        lambda: b'{"prompt":"x","max_tokens":1,"a":"%b"}' % LINES,
        {200},
        "",
    ),
    "a long name": ("completions", lambda: b'{"prompt":"x","max_tokens":1,"%b":1}' % LINES, {200}, ""),
    "a wrong type": ("completions", lambda: b'{"prompt":"x","max_tokens":"%b"}' % LINES, {400}, "max_tokens"),
    "/tokenize": ("/tokenize", lambda: json.dumps({"prompt": "a" * LARGEST}).encode(), {400}, "prompt"),
    "/detokenize": ("/detokenize", lambda: b'{"tokens":[' + b"1," * 1_000_000 + b"1]}", {400}, "tokens"),
    "tokenized text": ("/tokenize", lambda: json.dumps({"prompt": "a " * 200_000}).encode(), {200}, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_a_bystanders_stream_goes_on(server: Server, name: str) -> None:
    path, make, statuses, word = ATTACKS[name]
    url = path if path.startswith("/") else f"/v1/{path}"
    sent = make()
    with (
        Bystander(server.url, processes_of(server)) as bystander,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        replies: list[Any] = []
        base = memory_mb(server)
        for _ in range(2):
            reply = client.post(url, content=sent, headers=HEADERS)
            assert reply.status_code in statuses, reply.text[:300]
            if reply.status_code >= 400:
                assert len(reply.content) < 2000
                assert word in reply.text
            replies.append(reply)
            assert client.get("/health").status_code == 200, "the next request on the connection"
        grown = memory_mb(server) - base
    check_delay(bystander.gaps, f"{name}, {grown:+.0f} MB")
    assert grown < MEMORY_MB
    assert psutil.pid_exists(server.process.pid)


CONNECTIONS = 500
TINY_CHUNKS = b"1\r\n \r\n" * 20_000


@pytest.mark.slow
def test_a_bystanders_stream_goes_on_beside_connections_with_tiny_chunks(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = urlsplit(server.url)
    with (
        Bystander(server.url, processes_of(server)) as bystander,
        ExitStack() as stack,
        selectors.DefaultSelector() as selector,
    ):
        for _ in range(CONNECTIONS):
            client = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            client.sendall(head)
            client.setblocking(False)
            selector.register(client, selectors.EVENT_WRITE, TINY_CHUNKS)
        ends_at = time.monotonic() + 3
        while time.monotonic() < ends_at:
            for key, _ in selector.select(0.1):
                with suppress(BlockingIOError):
                    left = key.data[key.fileobj.send(key.data) :]  # type: ignore[union-attr]
                    selector.modify(key.fileobj, selectors.EVENT_WRITE, left or TINY_CHUNKS)
    check_delay(bystander.gaps, f"{CONNECTIONS} connections")


def check_delay(gaps: Gaps, name: str) -> None:
    delay_s = gaps.worst - gaps.usual - gaps.lateness
    print(f"{name}: delay {delay_s * 1000:.0f} ms, {gaps.events} events")
    assert delay_s < LONGEST_DELAY_S
    assert gaps.broken == []
