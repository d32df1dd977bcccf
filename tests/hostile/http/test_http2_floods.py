"""Floods of HTTP/2 frames against a running server: their connection ends, and the server answers others."""

from __future__ import annotations

import json

import psutil
import pytest

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import frame
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.http2.rates import CONTROL_BURST, RESET_BURST
from tests.hostile.http.raw import KEY, PROBE, RawClient
from tests.integration.server import Server, total, wait_until

ROOM = 40 << 20
BODY = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1000, "stream": True}).encode()
BLOCK = encode_fields(
    [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/v1/completions"),
        (b":authority", b"x"),
        (b"authorization", b"Bearer " + KEY.encode()),
        (b"content-type", b"application/json"),
    ]
)


def request(stream_id: int) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS, stream_id, BLOCK) + frame(
        frames.DATA, frames.END_STREAM, stream_id, BODY
    )


FLOODS = {
    "PING": frames.ping(b"12345678") * (CONTROL_BURST + 5000),
    "SETTINGS": frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 5}) * (CONTROL_BURST + 5000),
    "CONTINUATION": frame(frames.HEADERS, 0, 1, BLOCK)
    + frame(frames.CONTINUATION, 0, 1) * (CONTROL_BURST + 5000),
    "rapid reset": b"".join(
        request(2 * n + 1) + frames.rst_stream(2 * n + 1, 8) for n in range(RESET_BURST + 1000)
    ),
    "provoked resets": b"".join(
        request(2 * n + 1) + frames.window_update(2 * n + 1, 0) for n in range(RESET_BURST + 1000)
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_ends_its_connection_alone(server: Server, flood: str) -> None:
    (api,) = server.children("api-server")
    process = psutil.Process(api.pid)
    base = process.memory_info().rss
    with RawClient(server.url) as other, RawClient(server.url, receive_buffer=4096) as client:
        try:
            client.send(frames.PREFACE + frames.settings_frame({}) + FLOODS[flood])
            client.socket.settimeout(90)
            received = b""
            while data := client.socket.recv(1 << 16):
                received += data
        except ConnectionError:  # it was closed while we sent
            pass
        else:
            code = ErrorCode.ENHANCE_YOUR_CALM.to_bytes(4, "big")
            assert code + b"too many" in received
        other.send(PROBE)
        assert other.reply().status == 200
    assert process.memory_info().rss < base + ROOM
    wait_until(lambda: _streams(server) == 0, 90, "the end of the streams")
    assert "ERROR" not in server.log


def _streams(server: Server) -> float:
    text = server.metrics(authorization=f"Bearer {KEY}")
    return total(text, "penstock:streams")
