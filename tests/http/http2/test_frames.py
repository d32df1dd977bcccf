"""Frames from bytes, however they are cut, and back."""

from __future__ import annotations

import pytest

from penstock.http.http2 import frames
from penstock.http.http2.faults import ConnectionFault, ErrorCode
from penstock.http.http2.frames import FrameScanner

SEVERAL = b"".join(
    (
        frames.settings_frame({frames.MAX_CONCURRENT_STREAMS: 100, frames.INITIAL_WINDOW_SIZE: 70_000}),
        frames.frame(frames.DATA, frames.END_STREAM, 1, b"x" * 300),
        frames.window_update(3, 5),
        frames.ping(b"12345678", ack=True),
        frames.goaway(7, ErrorCode.ENHANCE_YOUR_CALM, "why"),
    )
)
EXPECTED = [
    (frames.SETTINGS, 0, 0, bytes.fromhex("000300000064 000400011170")),
    (frames.DATA, frames.END_STREAM, 1, b"x" * 300),
    (frames.WINDOW_UPDATE, 0, 3, bytes.fromhex("00000005")),
    (frames.PING, frames.ACK, 0, b"12345678"),
    (frames.GOAWAY, 0, 0, bytes.fromhex("00000007 0000000b") + b"why"),
]


@pytest.mark.parametrize("piece", [1, 2, 8, 9, 10, 100, 1000])
def test_frames_are_found_however_their_bytes_come(piece: int) -> None:
    scanner, found = FrameScanner(), list[frames.Frame]()
    for start in range(0, len(SEVERAL), piece):
        scanner.receive(SEVERAL[start : start + piece])
        found += scanner.take_frames(100)
    assert found == EXPECTED
    assert not scanner.waiting


def test_frames_are_taken_in_turns() -> None:
    scanner = FrameScanner()
    scanner.receive(SEVERAL)
    assert scanner.take_frames(2) + scanner.take_frames(2) + scanner.take_frames(2) == EXPECTED


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    scanner = FrameScanner()
    scanner.receive(bytes.fromhex("000000 00 00 80000005"))
    assert scanner.take_frames(1) == [(frames.DATA, 0, 5, b"")]


def test_a_frame_that_is_too_large_is_refused_by_its_header_and_behind_those_before_it() -> None:
    scanner = FrameScanner()
    scanner.receive(SEVERAL + frames.frame_header(16_385, frames.DATA, 0, 1))
    assert scanner.take_frames(100) == EXPECTED
    with pytest.raises(ConnectionFault, match="16385 bytes is larger than 16384") as caught:
        scanner.take_frames(100)
    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_a_long_header_block_continues() -> None:
    scanner = FrameScanner()
    scanner.receive(frames.header_frames(5, b"b" * 40_000, end_stream=True, max_frame_size=16_384))
    found = scanner.take_frames(10)
    assert [each[:3] for each in found] == [
        (frames.HEADERS, frames.END_STREAM, 5),
        (frames.CONTINUATION, 0, 5),
        (frames.CONTINUATION, frames.END_HEADERS, 5),
    ]
    assert b"".join(each[3] for each in found) == b"b" * 40_000


def test_padding_is_removed() -> None:
    assert frames.without_padding(frames.PADDED, b"\3abc\0\0\0") == b"abc"
    assert frames.without_padding(0, b"\3abc") == b"\3abc"
    assert frames.without_padding(frames.PADDED, b"\3\0\0\0") == b""
    for payload in (b"", b"\4abc", b"\1"):
        with pytest.raises(ConnectionFault):
            frames.without_padding(frames.PADDED, payload)


def test_payloads_of_a_wrong_length_are_refused() -> None:
    for call in (
        lambda: frames.unpack_settings(b"12345"),
        lambda: frames.unpack_goaway(b"1234567"),
        lambda: frames.unpack_long(b"123", "RST_STREAM"),
    ):
        with pytest.raises(ConnectionFault) as caught:
            call()
        assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR
