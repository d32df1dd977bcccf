"""Streams over HTTP/2 connections of a real server: the same texts, cancelled, drained, slow."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.http.http2.frames import (
    DEFAULT_WINDOW,
    END_HEADERS,
    HEADERS,
    PREFACE,
    frame,
    rst_stream,
    settings_frame,
)
from penstock.http.http2.header_blocks import encode_fields
from tests.integration.clients import Completion, Http2Connection, address_of
from tests.integration.server import SYNTHETIC, Server, wait_until

BODY: dict[str, Any] = {"prompt": "x", "seed": 1, "max_tokens": 1900, "ignore_eos": True}
PACED = (*SYNTHETIC, "--synthetic-step-ms", "10", "--max-stream-backlog", "4096", "--drain-timeout", "300")


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose streams outlast any test but the last."""
    with Server(*PACED, directory=tmp_path_factory.mktemp("paced")) as running:
        yield running


def connect(server: Server, *bodies: dict[str, Any], window: int = DEFAULT_WINDOW) -> Http2Connection:
    return Http2Connection(address_of(server.url), [Completion(body) for body in bodies], window)


def test_a_connection_brings_the_texts_of_http1(server: Server) -> None:
    bodies = [
        {"prompt": "x", "seed": seed, "max_tokens": 40, "n": 1 + seed % 3, "temperature": 1.0}
        for seed in range(50)
    ]
    with connect(server, *bodies) as connection:
        connection.until_all_ended()
        assert all(each.done and each.failure is None for each in connection.clients)
        for number in (0, 3, 30):
            whole = server.complete(**bodies[number])
            assert connection.clients[number].text == whole["choices"][0]["text"]


def test_rst_stream_frees_one_stream_and_a_lost_connection_all(paced: Server) -> None:
    with connect(paced, *[BODY] * 40) as connection:
        connection.until_each_has(1)
        for number in range(0, 40, 2):
            connection.cancel(number)
        wait_until(lambda: paced.metric("penstock:streams") == 20, 90, "freeing the handles")
        wait_until(lambda: paced.metric("vllm:num_requests_running") == 20, 90, "freeing the slots")
        others = [(each, len(each.pieces) + 5) for each in connection.clients[1::2]]
        connection.until(lambda: all(len(each.pieces) > count for each, count in others))
    wait_until(lambda: paced.metric("penstock:streams") == 0, 90, "freeing the handles of all")
    assert "ERROR" not in paced.log


def test_requests_that_are_reset_as_they_come_are_logged(tmp_path: Path) -> None:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/v1/completions"),
        (b":authority", b"h"),
    ]
    with (
        Server(*SYNTHETIC, "--access-log", "all", directory=tmp_path) as server,
        socket.create_connection(address_of(server.url), timeout=60) as connection,
    ):
        head = frame(HEADERS, END_HEADERS, 1, encode_fields([*fields, (b"x-request-id", b"left")]))
        connection.sendall(PREFACE + settings_frame({}) + head + rst_stream(1, 8))
        wait_until(lambda: "request_id=left " in server.log, 60, "the line of the request")


def test_streams_whose_windows_stay_shut_are_reset_and_others_of_the_connection_go_on(paced: Server) -> None:
    bodies = BODY, BODY, BODY | {"return_token_ids": True}  # which counts as backlog
    with connect(paced, *bodies, window=1000) as connection:
        reader, late, shut = connection.clients
        connection.shut_window(1)
        connection.shut_window(2)
        connection.until(lambda: len(reader.pieces) > 50)
        before = len(late.pieces)
        connection.open_window(1)
        connection.until(lambda: len(late.pieces) > before + 20)
        assert max(map(len, late.pieces)) > 50, "what was held is one event"
        connection.until(lambda: shut.ended)
        assert shut.failure == ("connection", "CANCEL")
        texts = sorted((reader.text, late.text), key=len)  # either may be an event ahead
        assert texts[1].startswith(texts[0])
        counts = len(reader.pieces), len(late.pieces)
        connection.until(lambda: len(reader.pieces) > counts[0] + 5 and len(late.pieces) > counts[1] + 5)


def test_a_drain_serves_what_is_on_its_way_and_ends_the_connection(tmp_path: Path) -> None:
    bodies = [BODY | {"max_tokens": 100}] * 16
    with Server(*PACED, directory=tmp_path) as server, connect(server, *bodies) as connection:
        connection.until_each_has(1)
        server.process.send_signal(signal.SIGTERM)
        connection.until_all_ended()
        assert all(each.done and each.failure is None for each in connection.clients)
        connection.until(lambda: connection.closed)
        assert connection.http2.last_ids == [2**31 - 1, 31]
        connection.socket.close()
        assert server.process.wait(60) == 0
