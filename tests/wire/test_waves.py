"""The wire format of messages between engines in lock-step, byte by byte."""

from __future__ import annotations

import pytest

from penstock.wire.coordination import EngineJoin
from penstock.wire.messages import WireError, encode
from penstock.wire.waves import LeaveGroup, StartWave, Vote, decode_from_peer


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (StartWave(3), "922003"),
        (Vote(0, True), "932100c3"),
        (Vote(1 << 40, False), "9321cf0000010000000000c2"),
        (LeaveGroup(), "9122"),
    ],
)
def test_messages(message: object, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decode_from_peer(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(
    "part", [b"", b"\xff", encode(StartWave(-1)), encode(EngineJoin(1, 2, 3)), b"\x92\x21\x00"]
)
def test_what_is_no_message_is_refused(part: bytes) -> None:
    with pytest.raises(WireError, match="not a message of an engine in lock-step"):
        decode_from_peer(part)
