"""The codec of WebSocket messages, against wsproto's other role and the frames of RFC 6455."""

from __future__ import annotations

import pytest
from wsproto.frame_protocol import FrameProtocol

from penstock.http.websocket.codec import (
    FRAMES_PER_TURN,
    NOT_TEXT,
    PROTOCOL_ERROR,
    TOO_BIG,
    Closed,
    Codec,
    Event,
    Ping,
    Pong,
    ProtocolFault,
    Text,
    text_head,
)

LIMIT = 100_000


def server() -> Codec:
    return Codec(client=False, max_bytes=LIMIT)


def frame(opcode: int, payload: bytes, *, fin: bool = True, mask: bool = True) -> bytes:
    """A frame of a client, as RFC 6455 §5.2 draws it."""
    size = len(payload)
    head = bytes([(0x80 if fin else 0) | opcode])
    flag = 0x80 if mask else 0
    if size < 126:
        head += bytes([flag | size])
    elif size < 1 << 16:
        head += bytes([flag | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([flag | 127]) + size.to_bytes(8, "big")
    if not mask:
        return head + payload
    key = b"\x37\xfa\x21\x3d"  # names of tests must not change from run to run
    return head + key + bytes(byte ^ key[index % 4] for index, byte in enumerate(payload))


def read(codec: Codec, data: bytes) -> list[Event]:
    codec.receive(data)
    found = codec.events()
    while codec.has_more:
        found += codec.events()
    return found


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_both_roles_understand_each_other(size: int) -> None:
    data = ("é" * (size // 2) + "x" * (size % 2)).encode()
    ours, client = server(), Codec(client=True, max_bytes=LIMIT)
    assert read(ours, client.text(data)) == [Text(data)]
    assert read(client, ours.text(data)) == [Text(data)]
    assert ours.text(data) == FrameProtocol(False, []).send_data(data.decode())
    assert ours.text(data) == text_head(len(data)) + data


def test_messages_come_in_any_split() -> None:
    data = frame(1, "grün".encode()) + frame(9, b"p") + frame(1, b"x" * 300)
    codec = server()
    found = [event for byte in data for event in read(codec, bytes([byte]))]
    assert found == [Text("grün".encode()), Ping(b"p"), Text(b"x" * 300)]
    assert codec.held == 0


def test_control_frames_come_between_fragments() -> None:
    parts = [frame(1, b"one ", fin=False), frame(9, b"?"), frame(0, b"", fin=False), frame(10, b"!")]
    codec = server()
    assert read(codec, b"".join(parts)) == [Ping(b"?"), Pong(b"!")]
    assert codec.held == 4
    assert read(codec, frame(0, b"two")) == [Text(b"one two")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(2, b"\0"), NOT_TEXT),
        (frame(1, b"\xff"), 1007),
        (frame(1, b"\xc3", fin=False) + frame(0, b"("), 1007),
        (frame(1, b"x", mask=False), PROTOCOL_ERROR),
        (frame(0, b"x"), PROTOCOL_ERROR),
        (frame(1, b"a", fin=False) + frame(1, b"b"), PROTOCOL_ERROR),
        (frame(9, b"", fin=False), PROTOCOL_ERROR),
        (frame(9, b"x" * 126), PROTOCOL_ERROR),
        (b"\xc1\x80abcd", PROTOCOL_ERROR),  # a reserved bit: compressed
        (frame(3, b""), PROTOCOL_ERROR),
        (frame(8, b"\x03"), PROTOCOL_ERROR),
        (frame(8, (1005).to_bytes(2, "big")), PROTOCOL_ERROR),
        (frame(1, b"x" * (LIMIT + 1)), TOO_BIG),
        (frame(1, b"x" * LIMIT, fin=False) + frame(0, b"x"), TOO_BIG),
    ],
)
def test_faults_have_their_codes(data: bytes, code: int) -> None:
    codec = server()
    with pytest.raises(ProtocolFault) as fault:
        read(codec, data)
    assert fault.value.code == code


def test_a_huge_frame_is_refused_as_it_comes() -> None:
    codec = server()
    assert read(codec, b"\x81\xff" + (1 << 40).to_bytes(8, "big") + bytes(4)) == []
    assert read(codec, b"x" * 65536) == []
    assert codec.held == 65536
    with pytest.raises(ProtocolFault):
        read(codec, b"x" * 65536)


def test_a_flood_of_empty_frames_takes_turns_and_no_memory() -> None:
    codec, flood = server(), frame(1, b"", fin=False) + frame(0, b"", fin=False) * 10_000
    codec.receive(flood)
    assert codec.held == len(flood)
    turns = 0
    while codec.has_more:
        assert codec.events() == []
        turns += 1
    assert turns == 10_001 // FRAMES_PER_TURN + 1
    assert codec.held == 0


def test_the_end_is_said_once() -> None:
    codec = server()
    assert read(codec, frame(8, (1000).to_bytes(2, "big") + b"bye") + frame(1, b"late")) == [
        Closed(1000, "bye")
    ]
    assert codec.close(1000) == b"\x88\x02\x03\xe8"
    assert codec.close(1001, "again") == b""
    assert read(server(), frame(8, b"")) == [Closed(1005, "")]
    assert len(server().close(1011, "é" * 200)) <= 127
