"""What the core does at either end of a connection alike, with an owner that records what it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.http.http2 import frames as h2
from penstock.http.http2.core import Http2Core
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault
from penstock.http.http2.header_blocks import Field, encode_fields
from penstock.http.http2.rates import CONTROL_BURST
from penstock.http.http2.roles import Role, client_role, server_role

SERVER = server_role(1 << 14)
CLIENT = client_role(receive_window=1 << 20, stream_window=1 << 18, window_changes=100)
BOTH = pytest.mark.parametrize("role", [SERVER, CLIENT], ids=["server", "client"])
BLOCK = encode_fields([(b"a", b"b")])


class Owner:
    """An owner and sending half, with stream 1 open."""

    def __init__(self, role: Role) -> None:
        self.data_bytes = 0
        self.sent: list[bytes] = []
        self.write: Callable[[bytes], object] = self.sent.append
        self.told: list[tuple[object, ...]] = []
        self.core = Http2Core[str](role, {1: "one"}, self, self, 0.0)
        self.core.last_id = 1
        self.core.handle(h2.SETTINGS, 0, 0, b"")

    def widen(self, stream: str | None, increment: int) -> bool:
        self.told.append(("widen", stream, increment))
        return increment < 1 << 30

    def change_initial_window(self, difference: int) -> bool:
        self.told.append(("windows", difference))
        return True

    def on_headers(self, stream_id: int, fields: list[Field] | None, size: int, *, last: bool) -> None:
        self.told.append(("headers", stream_id, fields, size, last))

    def on_data(self, stream_id: int, stream: str | None, content: bytes, size: int, *, last: bool) -> None:
        self.told.append(("data", stream, content, size, last))

    def on_reset(self, stream_id: int, stream: str | None, code: int) -> None:
        self.told.append(("reset", stream_id, stream, code))

    def on_stream_fault(self, fault: StreamFault) -> None:
        self.told.append(("fault", fault.stream_id, fault.code))

    def on_settings(self) -> None:
        self.told.append(("settings",))

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        self.told.append(("goaway", last_id, code, debug))

    def on_ping_ack(self, payload: bytes) -> None:
        self.told.append(("ack", payload))

    def receive(self, data: bytes) -> None:
        scanner = h2.FrameScanner()
        scanner.receive(data)
        for frame in scanner.take_frames(1 << 20):
            self.core.handle(*frame)


@BOTH
def test_its_owner_is_told_what_concerns_streams_and_the_end(role: Role) -> None:
    owner = Owner(role)
    owner.told.clear()
    owner.receive(
        h2.frame(h2.HEADERS, 0, 1, BLOCK[:2])
        + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, BLOCK[2:])
        + h2.frame(h2.DATA, h2.PADDED | h2.END_STREAM, 1, b"\2data\0\0")
        + h2.window_update(1, 5)
        + h2.window_update(0, 6)
        + h2.rst_stream(1, 8)
        + h2.ping(b"12345678", ack=True)
        + h2.goaway(7, 2, "why")
        + h2.settings_frame({h2.INITIAL_WINDOW_SIZE: h2.DEFAULT_WINDOW + 9})
    )
    assert owner.told == [
        ("headers", 1, [(b"a", b"b")], len(BLOCK), False),
        ("data", "one", b"data", 7, True),
        ("widen", "one", 5),
        ("widen", None, 6),
        ("reset", 1, "one", 8),
        ("ack", b"12345678"),
        ("goaway", 7, 2, b"why"),
        ("windows", 9),
        ("settings",),
    ]
    assert owner.sent == [h2.SETTINGS_ACK] * 2


@BOTH
def test_what_concerns_the_connection_alone_is_answered(role: Role) -> None:
    owner = Owner(role)
    owner.receive(h2.ping(b"12345678"))
    assert owner.sent.pop() == h2.ping(b"12345678", ack=True)
    size = 16_384
    for _ in range(role.receive_window // 2 // size + 1):
        owner.receive(h2.frame(h2.DATA, 0, 1, bytes(size)))
    assert owner.sent.pop() == h2.window_update(0, role.receive_window // 2 + size)
    assert owner.core.receive_window == role.receive_window


FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "DATA on a stream that is not open yet": (h2.frame(h2.DATA, 0, 3, b"x"), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE on a stream that is not open yet": (h2.window_update(3, 1), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM on a stream that is not open yet": (h2.rst_stream(3, 8), ErrorCode.PROTOCOL_ERROR),
    "HEADERS on an even stream": (h2.frame(h2.HEADERS, h2.END_HEADERS, 2, BLOCK), ErrorCode.PROTOCOL_ERROR),
    "a block within a block": (h2.frame(h2.HEADERS, 0, 1, BLOCK) * 2, ErrorCode.PROTOCOL_ERROR),
    "CONTINUATION without HEADERS": (h2.frame(h2.CONTINUATION, 4, 1, BLOCK), ErrorCode.PROTOCOL_ERROR),
    "PING on a stream": (h2.frame(h2.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "a short PING": (h2.frame(h2.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (h2.frame(h2.SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "an acknowledgement with SETTINGS": (
        h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "GOAWAY on a stream": (h2.frame(h2.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "PRIORITY without a stream": (h2.frame(h2.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "PUSH_PROMISE": (h2.frame(h2.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a window of the connection of 0 more": (h2.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "a window of the connection above 2^31-1": (h2.window_update(0, 1 << 30), ErrorCode.FLOW_CONTROL_ERROR),
    "a flood of unknown frames": (h2.frame(77, 0, 0) * (CONTROL_BURST + 9), ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of resets": (h2.rst_stream(1, 8) * (CONTROL_BURST + 9), ErrorCode.ENHANCE_YOUR_CALM),
}


@BOTH
@pytest.mark.parametrize("case", FAULTS)
def test_faults_of_the_connection(role: Role, case: str) -> None:
    sent, code = FAULTS[case]
    owner = Owner(role)
    if case == "a flood of resets":
        del owner.core.streams[1]
    with pytest.raises(ConnectionFault) as raised:
        owner.receive(sent)
    assert raised.value.code is code
    owner.core.end()
    owner.told.clear()
    owner.receive(sent + h2.ping(bytes(8)))
    assert owner.told == []


@BOTH
def test_faults_of_a_stream(role: Role) -> None:
    owner = Owner(role)
    owner.receive(h2.window_update(1, 0) + h2.window_update(1, 1 << 30))
    assert owner.told[-1] == ("fault", 1, ErrorCode.FLOW_CONTROL_ERROR)
    assert ("fault", 1, ErrorCode.PROTOCOL_ERROR) in owner.told


def test_a_client_opens_odd_streams_and_begins_with_the_preface() -> None:
    owner = Owner(CLIENT)
    assert [owner.core.open("x") for _ in range(3)] == [3, 5, 7]
    assert CLIENT.hello.startswith(h2.PREFACE)
    assert not SERVER.hello.startswith(h2.PREFACE)


def test_only_a_client_may_be_asked_for_no_pushes() -> None:
    asked = h2.settings_frame({h2.ENABLE_PUSH: 1})
    Owner(SERVER).receive(asked)
    with pytest.raises(ConnectionFault):
        Owner(CLIENT).receive(asked)
