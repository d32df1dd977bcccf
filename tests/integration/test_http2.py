"""Streams over HTTP/2 connections of a real server: the same texts, cancelled, drained, slow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.http.http2.faults import ErrorCode
from tests.integration.http2_client import Http2Client
from tests.integration.server import SYNTHETIC, Server, wait_until

BODY: dict[str, Any] = {"prompt": "x", "seed": 1, "max_tokens": 1900, "ignore_eos": True}
PACED = (*SYNTHETIC, "--synthetic-step-ms", "10", "--max-stream-backlog", "4096", "--drain-timeout", "300")


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose streams outlast any test but the last."""
    with Server(*PACED, directory=tmp_path_factory.mktemp("paced")) as running:
        yield running


def test_a_connection_brings_the_texts_of_http1(server: Server) -> None:
    bodies = [
        {"prompt": "x", "seed": seed, "max_tokens": 40, "n": 1 + seed % 3, "temperature": 1.0}
        for seed in range(50)
    ]
    with Http2Client(server.url) as client:
        client.request(*bodies)
        client.read_until(client.all_ended)
        assert not client.resets
        for number in (0, 3, 30):
            whole = server.complete(**bodies[number])
            assert client.text(number) == "".join(choice["text"] for choice in whole["choices"])
            assert client.events(number)[-1] == b"[DONE]"


def test_rst_stream_frees_one_stream_and_a_lost_connection_all(paced: Server) -> None:
    with Http2Client(paced.url) as client:
        client.request(*[BODY] * 40)
        client.read_until(client.all_begun)
        for number in range(0, 40, 2):
            client.cancel(number)
        wait_until(lambda: paced.metric("penstock:streams") == 20, 30, "freeing the handles")
        wait_until(lambda: paced.metric("vllm:num_requests_running") == 20, 30, "freeing the slots")
        counts = [len(client.events(number)) for number in range(40)]
        client.read_until(lambda: all(len(client.events(n)) > counts[n] + 5 for n in range(1, 40, 2)))
    wait_until(lambda: paced.metric("penstock:streams") == 0, 30, "freeing the handles of all")
    assert "ERROR" not in paced.log


def test_streams_whose_windows_stay_shut_are_reset_and_others_of_the_connection_go_on(paced: Server) -> None:
    with Http2Client(paced.url, window=1000) as client:
        client.request(BODY, BODY, BODY | {"return_token_ids": True})  # which counts as backlog
        client.open_window(0, 2**30)
        client.read_until(lambda: len(client.events(0)) > 50)
        before = len(client.events(1))
        client.open_window(1, 2**30)
        client.read_until(lambda: len(client.events(1)) > before + 20)
        assert max(map(len, client.events(1))) > 300, "what was held is one event"
        client.read_until(lambda: client.resets)
        assert client.resets == {2: ErrorCode.CANCEL}
        assert client.text(0).startswith(client.text(1))
        counts = len(client.events(0)), len(client.events(1))
        client.read_until(lambda: all(len(client.events(n)) > counts[n] + 5 for n in (0, 1)))


def test_a_drain_serves_what_is_on_its_way_and_ends_the_connection(tmp_path: Path) -> None:
    with Server(*PACED, directory=tmp_path) as server, Http2Client(server.url) as client:
        client.request(*[BODY | {"max_tokens": 100}] * 16)
        client.read_until(client.all_begun)
        server.process.send_signal(signal.SIGTERM)
        client.read_until(client.all_ended)
        assert not client.resets
        assert all(client.events(number)[-1] == b"[DONE]" for number in range(16))
        client.read_until(lambda: client.closed)
        assert client.goaways == [2**31 - 1, 31]
        client.socket.close()
        assert server.process.wait(60) == 0
