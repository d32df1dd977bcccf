"""The wire format of the coordinator's messages, byte by byte."""

from __future__ import annotations

import pytest

from penstock.wire.coordination import (
    MAX_ACCEPTED,
    MAX_SNAPSHOT_BYTES,
    MAX_TRAITS,
    EngineAddress,
    EngineJoin,
    EngineLoad,
    EngineReport,
    FleetLoad,
    JoinAccepted,
    JoinRejected,
    MemberLeave,
    MetricsAnswer,
    MetricsQuery,
    MetricsRequest,
    MetricsSent,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
    check_identity,
    decode_from_coordinator,
    decode_from_member,
)
from penstock.wire.messages import WireError, encode
from penstock.wire.sockets import engine_identity, server_identity

FROM_MEMBERS = [
    (
        EngineJoin(1, 2, 3, 4, "tcp://1.2.3.4:5", {"b": "c"}),
        "970101020304af7463703a2f2f312e322e332e343a3581a162a163",
    ),
    (ServerJoin(1, 2, 3, 4, "5"), "960201020304a135"),
    (EngineReport(300, 1, 2, 0.5, [0, 7]), "9603cd012c0102cb3fe0000000000000920007"),
    (MemberLeave(), "9104"),
    (ProcessMetrics("engine 0", 1, 2, b"x", 3), "9605a8656e67696e6520300102c4017803"),
    (MetricsQuery(7, True), "930607c3"),
    (MetricsSent(7), "920707"),
]
FROM_COORDINATOR = [
    (FleetLoad([EngineLoad(0, 1, 2, 3, 4, 0.5, 6, 7)]), "921091980001020304cb3fe00000000000000607"),
    (Rejoin(), "9111"),
    (JoinRejected("no"), "9212a26e6f"),
    (JoinAccepted(5), "921305"),
    (EngineAddress(1, 2, 3, "tcp://1.2.3.4:5"), "9514010203af7463703a2f2f312e322e332e343a35"),
    (MetricsAnswer(7), "921507"),
    (MetricsRequest(7), "921607"),
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


ADDRESSES = [
    "foo",
    "tcp://foo:5",
    "tcp://1.2.3.4:0",
    "tcp://1.2.3.4:65536",
    "tcp://1.2.3:5",
    "ipc:///x",
    "tcp://*:5",
]


@pytest.mark.parametrize("address", [*ADDRESSES, "tcp://1.2.3.4:5 ", "tcp://1.2.3.4:٥"])
def test_an_engines_address_is_an_ip_address_and_a_port(address: str) -> None:
    with pytest.raises(WireError, match="address"):
        decode_from_member(encode(EngineJoin(1, 0, 0, 0, address)))
    with pytest.raises(WireError, match="address"):
        decode_from_coordinator(encode(EngineAddress(0, 0, 0, address)))


@pytest.mark.parametrize("address", ["", "tcp://1.2.3.4:5", "tcp://[::1]:65535", "tcp://[fe80::1%eth0]:5"])
def test_addresses_that_are_taken(address: str) -> None:
    decode_from_member(encode(EngineJoin(1, 0, 0, 0, address)))


@pytest.mark.parametrize(
    "message",
    [
        EngineJoin(1, 0, 0, 0, "", {f"{number}": "" for number in range(MAX_TRAITS + 1)}),
        EngineJoin(1, 0, 0, 0, "", {"x": "y" * 1025}),
        EngineReport(0, 0, 0, 0, [1] * (MAX_ACCEPTED + 2)),
        EngineReport(0, 0, 0, 1001, []),
        ProcessMetrics("engine 0", 0, 0, bytes(MAX_SNAPSHOT_BYTES + 1)),
        ProcessMetrics("x" * 65, 0, 0, b""),
        ServerJoin(1, -1, 0),
        EngineJoin(1, 0, 0, 1 << 63),
    ],
)
def test_fields_out_of_bounds_are_refused(message: object) -> None:
    with pytest.raises(WireError):
        decode_from_member(encode(message))


def test_a_join_is_that_of_its_connection() -> None:
    check_identity(engine_identity(3, 1, 7), EngineJoin(1, 3, 1, 7))
    check_identity(server_identity(3, 1, 7), ServerJoin(1, 3, 1, 7))
    check_identity(b"anything", MemberLeave())
    for identity in (engine_identity(3, 1, 8), engine_identity(3, 0, 7), server_identity(3, 1, 7), b""):
        with pytest.raises(WireError, match="engine-3-1-7"):
            check_identity(identity, EngineJoin(1, 3, 1, 7))


def test_a_member_refuses_what_is_no_message() -> None:
    with pytest.raises(WireError, match="not a message of a coordinator"):
        decode_from_coordinator(encode(MemberLeave()))
