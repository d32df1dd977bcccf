"""Clients that leave or do not read: their streams end, and nobody else notices."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.http.chunks import unframed
from tests.integration.clients import Completion, Http2Connection, address_of
from tests.integration.server import SYNTHETIC, Server, wait_until
from tests.integration.test_connections import connect, read_until, request

LAST_CHUNK = b"0\r\n\r\n"
FREE_WITHIN_S = 90.0
"""A bound for hangs; `penstock bench` measures how long it takes."""


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose streams take 190 s: they outlast any test, and leave the processors to it."""
    arguments = (*SYNTHETIC, "--synthetic-step-ms", "100")
    with Server(*arguments, directory=tmp_path_factory.mktemp("paced")) as running:
        yield running


def open_streams(server: Server, count: int, **options: object) -> list[socket.socket]:
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True} | options
    connections = [connect(server) for _ in range(count)]
    for connection in connections:
        connection.sendall(request(body))
    return connections


@pytest.mark.parametrize("count", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_streams_of_clients_that_left_are_freed_within_a_second(paced: Server, count: int) -> None:
    (api,) = paced.children("api-server")
    paced.complete(max_tokens=1)
    before = api.num_fds()
    connections = open_streams(paced, count)
    for connection in connections:
        assert connection.recv(1)
    wait_until(
        lambda: paced.metric("vllm:num_requests_running") == count, FREE_WITHIN_S, "hearing of all that run"
    )
    for connection in connections:
        connection.close()
    wait_until(lambda: paced.metric("penstock:streams") == 0, FREE_WITHIN_S, "freeing the handles")
    wait_until(lambda: paced.metric("vllm:num_requests_running") == 0, FREE_WITHIN_S, "freeing the slots")
    wait_until(lambda: api.num_fds() <= before + 1, FREE_WITHIN_S, "closing the descriptors")
    assert "ERROR" not in paced.log
    assert paced.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_thousand_streams_of_one_http2_connection_are_freed(paced: Server) -> None:
    completions = [Completion({"prompt": "x", "max_tokens": 1900, "ignore_eos": True}) for _ in range(1000)]
    with Http2Connection(address_of(paced.url), completions) as connection:
        connection.until_each_has(1)
        wait_until(
            lambda: paced.metric("vllm:num_requests_running") == 1000,
            FREE_WITHIN_S,
            "hearing of all that run",
        )
    wait_until(lambda: paced.metric("penstock:streams") == 0, FREE_WITHIN_S, "freeing the handles")
    wait_until(lambda: paced.metric("vllm:num_requests_running") == 0, FREE_WITHIN_S, "freeing the slots")
    assert "ERROR" not in paced.log
    assert paced.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_requests_that_are_not_streamed_are_freed_as_well(paced: Server) -> None:
    aborted = paced.metric("penstock:requests_total", outcome="abort")
    streams = paced.metric("vllm:request_success_total", finished_reason="abort")
    connections = open_streams(paced, 20, stream=False)
    wait_until(lambda: paced.metric("penstock:streams") == 20, FREE_WITHIN_S, "starting the streams")
    for connection in connections:
        connection.close()
    wait_until(lambda: paced.metric("penstock:streams") == 0, FREE_WITHIN_S, "freeing the handles")
    wait_until(
        lambda: paced.metric("penstock:requests_total", outcome="abort") == aborted + 20,
        FREE_WITHIN_S,
        "counting them",
    )
    wait_until(
        lambda: paced.metric("vllm:request_success_total", finished_reason="abort") >= streams + 20,
        FREE_WITHIN_S,
        "hearing of it from the engine",
    )
    assert "ERROR" not in paced.log


def test_a_slow_reader_is_cut_and_others_go_on(tmp_path: Path) -> None:
    arguments = (*SYNTHETIC, "--synthetic-step-ms", "0.2", "--max-stream-backlog", "4096")
    with Server(*arguments, directory=tmp_path) as server, ExitStack() as stack:
        url = httpx.URL(server.url)
        slow = stack.enter_context(socket.socket())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((url.host, url.port))
        body = {
            "prompt": "x",
            "n": 64,
            "max_tokens": 1900,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1,
        }
        slow.sendall(request(body))
        wait_until(
            lambda: server.metric("penstock:requests_total", outcome="cut") == 1,
            30,
            "cutting the slow reader",
        )
        *events, done = server.stream(max_tokens=50, ignore_eos=True, return_token_ids=True)
        # a busy server may put two tokens into an event: tokens are counted, not events
        tokens = [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]
        assert (len(tokens), done) == (50, "[DONE]")
        wait_until(lambda: server.metric("penstock:streams") == 0, FREE_WITHIN_S, "freeing the handles")
        slow.settimeout(60)
        received = b"".join(read_to_the_end(slow))
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")
        assert "ERROR" not in server.log


def test_clients_that_read_late_get_all_that_was_said(tmp_path: Path) -> None:
    """More than their sockets hold, written for many at a time."""
    options = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "seed": 5}
    arguments = (*SYNTHETIC, "--synthetic-step-ms", "0.2")
    with Server(*arguments, directory=tmp_path) as server, ExitStack() as stack:
        whole = server.complete(**options)["choices"][0]["text"]
        url = httpx.URL(server.url)
        late = [stack.enter_context(socket.socket()) for _ in range(24)]
        for connection in late:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((url.host, url.port))
            connection.sendall(request(options | {"stream": True}))
        tokens = 1900 * (1 + len(late))
        wait_until(
            lambda: server.metric("vllm:generation_tokens_total") == tokens, FREE_WITHIN_S, "all tokens"
        )
        for connection in late:
            connection.settimeout(60)
            reply = read_until(connection, LAST_CHUNK, 1).removesuffix(LAST_CHUNK)
            _, _, body = reply.partition(b"\r\n\r\n")
            *events, done, rest = unframed(body).decode().split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
            assert "".join(texts) == whole
        assert "ERROR" not in server.log


def read_to_the_end(connection: socket.socket) -> Iterator[bytes]:
    """What comes before the connection ends, by a reset or not."""
    try:
        while more := connection.recv(65536):
            yield more
    except ConnectionError:
        pass


def test_a_client_that_leaves_before_its_request_is_whole(paced: Server) -> None:
    whole = request({"prompt": "x" * 1000, "max_tokens": 5})
    for cut_at in (1, 20, len(whole) // 2, len(whole) - 1):
        with connect(paced) as connection:
            connection.sendall(whole[:cut_at])
    assert paced.complete(max_tokens=1)["choices"]
    assert "ERROR" not in paced.log


def test_clients_that_leave_while_they_wait_for_a_slot(tmp_path: Path) -> None:
    arguments = (*SYNTHETIC, "--synthetic-step-ms", "15", "--max-num-seqs", "1")
    with Server(*arguments, directory=tmp_path) as server, ExitStack() as stack:
        [running] = open_streams(server, 1)
        stack.enter_context(running)
        assert running.recv(1)
        streamed = open_streams(server, 3)
        whole = open_streams(server, 3, stream=False)
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 6, 90, "queueing six streams")
        for connection in (*streamed, *whole):
            connection.close()
        wait_until(lambda: server.metric("penstock:streams") == 1, FREE_WITHIN_S, "freeing the handles")
        wait_until(
            lambda: server.metric("vllm:num_requests_waiting") == 0, FREE_WITHIN_S, "emptying the queue"
        )
        assert server.metric("vllm:num_requests_running") == 1
        assert "ERROR" not in server.log


def test_clients_that_leave_while_their_prompt_is_tokenized(paced: Server) -> None:
    text = " ".join(f"word{number}" for number in range(200_000))
    connections = open_streams(paced, 4, prompt=text, truncate_prompt_tokens=100)
    for connection in connections:
        connection.close()
    wait_until(lambda: paced.complete(max_tokens=1)["choices"], 90, "serving others meanwhile")
    wait_until(lambda: paced.metric("penstock:streams") == 0, FREE_WITHIN_S, "freeing the handles")
    wait_until(lambda: paced.metric("vllm:num_requests_running") == 0, FREE_WITHIN_S, "freeing the slots")
    assert "ERROR" not in paced.log
