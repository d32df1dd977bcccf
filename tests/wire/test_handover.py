"""Connections that cross from one end to the other, or are taken back. Both ends are in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from penstock.wire.handover import TAKEN_AT_ONCE, Giver, Report, Taker


@pytest.fixture
def giver() -> Iterator[Giver]:
    made = Giver()
    yield made
    made.close()


@pytest.fixture
def taker(giver: Giver) -> Iterator[Taker]:
    made = Taker(os.dup(giver.server_end))
    yield made
    made.close()


def give(giver: Giver) -> socket.socket:
    """Hands one end of a pair over; returns the other one, the client."""
    client, connection = socket.socketpair()
    with connection:
        assert giver.give(connection)
    client.settimeout(60)
    return client


def belongs_to(client: socket.socket, connection: socket.socket) -> bool:
    with client, connection:
        connection.sendall(b"hello")
        return client.recv(5) == b"hello"


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_a_connection_is_taken_once_with_its_client(giver: Giver, taker: Taker) -> None:
    clients = [give(giver), give(giver)]
    taken = taker.take()
    assert [belongs_to(*pair) for pair in zip(clients, taken, strict=True)] == [True, True]
    assert taker.take() == []
    assert giver.take_back() == (0, [])


def test_what_is_not_taken_is_taken_back_and_lives(giver: Giver, taker: Taker) -> None:
    client = give(giver)
    giver.ask()
    count, [connection] = giver.take_back()
    assert count == 1
    assert taker.take() == []
    assert belongs_to(client, connection)


def test_no_more_than_so_many_are_taken_at_once(giver: Giver, taker: Taker) -> None:
    clients = [give(giver) for _ in range(TAKEN_AT_ONCE + 1)]
    first, second = taker.take(), taker.take()
    assert (len(first), len(second)) == (TAKEN_AT_ONCE, 1)
    close(clients + first + second)


def test_the_latest_report_holds(giver: Giver, taker: Taker) -> None:
    assert giver.report() is None
    assert taker.report(0, accepts=True)
    client = give(giver)
    close([client, *taker.take()])
    assert taker.report(1, accepts=True)
    assert taker.report(0, accepts=False)
    assert giver.report() == Report(taken=1, open=0, accepts=False)
    assert giver.report() is None


def test_a_report_is_said_again_only_when_asked_for(giver: Giver, taker: Taker) -> None:
    for _ in range(2):
        assert taker.report(3, accepts=True)
    assert giver.report() is not None
    assert taker.report(3, accepts=True)
    assert giver.report() is None
    giver.ask()
    assert taker.take() == []
    assert taker.report(3, accepts=True)
    assert giver.report() == Report(taken=0, open=3, accepts=True)


def test_a_full_socket_refuses_and_has_room_again_when_one_is_taken(giver: Giver, taker: Taker) -> None:
    client, connection = socket.socketpair()
    given = 0
    while giver.give(connection):
        given += 1
    giver.ask()  # no room for it either
    connections = []
    while more := taker.take():
        connections += more
    assert len(connections) == given > TAKEN_AT_ONCE
    assert giver.give(connection)
    close([*connections, *taker.take(), client, connection])


def test_a_report_without_room_is_still_to_be_said(giver: Giver, taker: Taker) -> None:
    number = 0
    while taker.report(number, accepts=True):
        number += 1
    assert giver.report() == Report(0, number - 1, True)
    assert taker.report(number, accepts=True)
    assert giver.report() == Report(0, number, True)


def test_a_connection_without_room_for_its_descriptor_counts_as_taken(
    giver: Giver, taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = give(giver)
    received = socket.socket.recvmsg

    def without_room(sock: socket.socket, *sizes: int) -> object:
        data, ancillary, flags, address = received(sock, *sizes)
        for _, _, descriptors in ancillary:
            os.close(int.from_bytes(descriptors, "little"))
        return data, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket.socket, "recvmsg", without_room)
    assert taker.take() == []
    taker.report(0, accepts=True)
    assert giver.report() == Report(taken=1, open=0, accepts=True)
    with client:
        assert client.recv(1) == b""
