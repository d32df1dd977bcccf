"""Connections that cross from one end to the other, or are taken back. Both ends are in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from penstock.wire.handover import MAX_RECEIVED_AT_ONCE, HandoverReceiver, HandoverReport, HandoverSender


@pytest.fixture
def giver() -> Iterator[HandoverSender]:
    made = HandoverSender()
    yield made
    made.close()


@pytest.fixture
def taker(giver: HandoverSender) -> Iterator[HandoverReceiver]:
    made = HandoverReceiver(os.dup(giver.server_end))
    yield made
    made.close()


def give(giver: HandoverSender) -> socket.socket:
    """Hands one end of a pair over; returns the other one, the client."""
    client, connection = socket.socketpair()
    with connection:
        assert giver.send(connection)
    client.settimeout(60)
    return client


def belongs_to(client: socket.socket, connection: socket.socket) -> bool:
    with client, connection:
        connection.sendall(b"hello")
        return client.recv(5) == b"hello"


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_a_connection_is_taken_once_with_its_client(giver: HandoverSender, taker: HandoverReceiver) -> None:
    clients = [give(giver), give(giver)]
    taken = taker.receive()
    assert [belongs_to(*pair) for pair in zip(clients, taken, strict=True)] == [True, True]
    assert taker.receive() == []
    assert giver.reclaim() == (0, [])


def test_what_is_not_taken_is_taken_back_and_lives(giver: HandoverSender, taker: HandoverReceiver) -> None:
    client = give(giver)
    giver.request_report()
    count, [connection] = giver.reclaim()
    assert count == 1
    assert taker.receive() == []
    assert belongs_to(client, connection)


def test_no_more_than_so_many_are_taken_at_once(giver: HandoverSender, taker: HandoverReceiver) -> None:
    clients = [give(giver) for _ in range(MAX_RECEIVED_AT_ONCE + 1)]
    first, second = taker.receive(), taker.receive()
    assert (len(first), len(second)) == (MAX_RECEIVED_AT_ONCE, 1)
    close(clients + first + second)


def test_the_latest_report_holds(giver: HandoverSender, taker: HandoverReceiver) -> None:
    assert giver.report() is None
    assert taker.report(0, accepts=True)
    client = give(giver)
    close([client, *taker.receive()])
    assert taker.report(1, accepts=True)
    assert taker.report(0, accepts=False)
    assert giver.report() == HandoverReport(taken=1, open=0, accepts=False)
    assert giver.report() is None


def test_a_report_is_said_again_only_when_asked_for(giver: HandoverSender, taker: HandoverReceiver) -> None:
    for _ in range(2):
        assert taker.report(3, accepts=True)
    assert giver.report() is not None
    assert taker.report(3, accepts=True)
    assert giver.report() is None
    giver.request_report()
    assert taker.receive() == []
    assert taker.report(3, accepts=True)
    assert giver.report() == HandoverReport(taken=0, open=3, accepts=True)


def test_a_full_socket_refuses_and_has_room_again_when_one_is_taken(
    giver: HandoverSender, taker: HandoverReceiver
) -> None:
    client, connection = socket.socketpair()
    given = 0
    while giver.send(connection):
        given += 1
    giver.request_report()  # no room for it either
    connections = []
    while more := taker.receive():
        connections += more
    assert len(connections) == given > MAX_RECEIVED_AT_ONCE
    assert giver.send(connection)
    close([*connections, *taker.receive(), client, connection])


def test_a_report_without_room_is_still_to_be_said(giver: HandoverSender, taker: HandoverReceiver) -> None:
    number = 0
    while taker.report(number, accepts=True):
        number += 1
    assert giver.report() == HandoverReport(0, number - 1, True)
    assert taker.report(number, accepts=True)
    assert giver.report() == HandoverReport(0, number, True)


def test_a_connection_without_room_for_its_descriptor_counts_as_taken(
    giver: HandoverSender, taker: HandoverReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = give(giver)
    received = socket.socket.recvmsg

    def without_room(sock: socket.socket, *sizes: int) -> object:
        data, ancillary, flags, address = received(sock, *sizes)
        for _, _, descriptors in ancillary:
            os.close(int.from_bytes(descriptors, "little"))
        return data, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket.socket, "recvmsg", without_room)
    assert taker.receive() == []
    taker.report(0, accepts=True)
    assert giver.report() == HandoverReport(taken=1, open=0, accepts=True)
    with client:
        assert client.recv(1) == b""
