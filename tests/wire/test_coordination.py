"""The wire format of the coordinator's messages, byte by byte."""

from __future__ import annotations

import pytest

from penstock.wire.coordination import (
    EngineAddress,
    EngineJoin,
    EngineLoad,
    EngineReport,
    FleetLoad,
    JoinAccepted,
    JoinRejected,
    MemberLeave,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
    decode_from_coordinator,
    decode_from_member,
)
from penstock.wire.messages import WireError, encode

FROM_MEMBERS = [
    (
        EngineJoin(1, 2, 3, 4, "tcp://1.2.3.4:5", {"b": "c"}),
        "970101020304af7463703a2f2f312e322e332e343a3581a162a163",
    ),
    (ServerJoin(1, 2, 3, 4), "950201020304"),
    (EngineReport(300, 1, 2, 500, [0, 7]), "9603cd012c0102cd01f4920007"),
    (MemberLeave(), "9104"),
    (ProcessMetrics("engine 0", 1, 2, b"x", 3), "9605a8656e67696e6520300102c4017803"),
]
FROM_COORDINATOR = [
    (FleetLoad([EngineLoad(0, 1, 2, 3, 4, 5, 6, 7)]), "921091980001020304050607"),
    (Rejoin(), "9111"),
    (JoinRejected("no"), "9212a26e6f"),
    (JoinAccepted(5), "921305"),
    (EngineAddress(1, 2, 3, "tcp://1.2.3.4:5"), "9514010203af7463703a2f2f312e322e332e343a35"),
    (ProcessMetrics("engine 0", 1, 2, b"x", 3), "9605a8656e67696e6520300102c4017803"),
]


@pytest.mark.parametrize(("message", "golden"), FROM_MEMBERS)
def test_members_messages(message: object, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decode_from_member(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(("message", "golden"), FROM_COORDINATOR)
def test_coordinators_messages(message: object, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decode_from_coordinator(bytes.fromhex(golden)) == message


def test_a_message_without_its_last_fields_is_taken() -> None:
    assert decode_from_coordinator(bytes.fromhex("9113")) == JoinAccepted()


@pytest.mark.parametrize(
    "part", [b"", b"\xff", encode(JoinRejected("no")), encode(EngineReport(0, 0, 0, 0, [1]))]
)
def test_a_coordinator_refuses_what_is_no_message(part: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_member(part)


def test_a_member_refuses_what_is_no_message() -> None:
    with pytest.raises(WireError, match="not a message of a coordinator"):
        decode_from_coordinator(encode(MemberLeave()))
