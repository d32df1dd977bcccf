"""Who is attached, and which streams are open, under which numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.engine.base import StepRows, StreamFailure
from penstock.engine.loop.peers import FIRST_STREAMS, Peers, peer_name
from penstock.wire.messages import RoutedExperts, WireError
from penstock.wire.sockets import server_identity
from tests.engine.loop.test_publisher import i32, step_rows


def test_a_peer_is_found_by_number_and_identity_until_it_is_detached() -> None:
    peers = Peers()
    peer = peers.attach(3, b"three")
    assert (peers.get(3), peers.find_peer(b"three"), list(peers)) == (peer, peer, [peer])
    peers.detach(peer)
    peers.detach(peer)
    assert (peers.get(3), peers.find_peer(b"three"), list(peers)) == (None, None, [])
    assert peers.take_disconnected() == [peer]
    assert peers.take_disconnected() == []


def test_a_number_is_not_attached_before_its_streams_are_dropped() -> None:
    peers = Peers()
    peers.detach(peers.attach(3, b"three"))
    with pytest.raises(AssertionError):
        peers.attach(3, b"again")
    peers.take_disconnected()
    peers.attach(3, b"again")
    with pytest.raises(AssertionError):
        peers.attach(3, b"once more")


def test_numbers_are_small_whatever_the_handles() -> None:
    peers = Peers()
    peer = peers.attach(1023, b"last")
    assert peers.open(peer, (1 << 31) - 1) < FIRST_STREAMS
    assert peers.open(peer, (1 << 22) - 1) < FIRST_STREAMS
    with pytest.raises(WireError, match="stream 4194303"):
        peers.open(peer, (1 << 22) - 1)


def test_streams_of_a_peer_that_left_are_numbered_anew_when_all_are_closed() -> None:
    peers = Peers()
    peer = peers.attach(0, b"zero")
    numbers = {peers.open(peer, handle) for handle in range(FIRST_STREAMS)}
    peers.detach(peer)
    peers.to_handles(step_rows([0], [min(numbers)], [0], [5], [2]))  # the step during which it left
    peers.close_all(*peers.take_disconnected())
    other = peers.attach(0, b"zero again")
    assert {peers.open(other, handle) for handle in range(FIRST_STREAMS)} == numbers


def test_rows_failures_and_transfer_params_are_given_handles() -> None:
    peers = Peers()
    zero, one = peers.attach(0, b"zero"), peers.attach(1, b"one")
    a, b, c = peers.open(zero, 900), peers.open(one, 900), peers.open(one, 70_000)
    rows = step_rows([0, 1, 1], [a, b, c], [0, 0, 0], [1, 2, 3], [0, 2, 0])
    rows.failed = [StreamFailure(1, c, 1, "engine_error", "m")]
    rows.kv_transfer_params = {1: {b: b"{}"}}
    rows.routed = [(1, RoutedExperts(b, 1, 1, 1, b""))]
    rows = peers.to_handles(rows)
    assert rows.stream.tolist() == [900, 900, 70_000]
    assert rows.failed == [StreamFailure(1, 70_000, 1, "engine_error", "m")]
    assert rows.kv_transfer_params == {1: {900: b"{}"}}
    assert rows.routed == [(1, RoutedExperts(900, 1, 1, 1, b""))]
    assert (list(zero.streams), list(one.streams)) == ([900], [])


@pytest.mark.parametrize("seed", range(5))
def test_against_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    peers = Peers()
    attached = [peers.attach(server, b"%d" % server) for server in range(3)]
    open_streams: dict[int, tuple[int, int]] = {}
    for _ in range(4000):
        if rng.random() < 0.55:
            server, handle = rng.randrange(3), rng.randrange(1 << 31)
            number = peers.open(attached[server], handle)
            assert number not in open_streams
            open_streams[number] = server, handle
        elif open_streams:
            numbers = rng.sample(sorted(open_streams), min(len(open_streams), 3))
            finish = [rng.choice([0, 2]) for _ in numbers]
            rows = StepRows(
                i32(*[open_streams[number][0] for number in numbers]),
                i32(*numbers),
                i32(*[0] * len(numbers)),
                i32(*[0] * len(numbers)),
                finish=np.array(finish, np.int8),
            )
            assert peers.to_handles(rows).stream.tolist() == [open_streams[number][1] for number in numbers]
            for number, end in zip(numbers, finish, strict=True):
                if end:
                    del open_streams[number]
    assert {(peer.server, handle) for peer in attached for handle in peer.streams} == set(
        open_streams.values()
    )


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        (server_identity(0, 3, 0xABC, 4), "api-server 0"),
        (server_identity(1023, 0), "api-server 1023"),
        (b"api-server-" + b"9" * 5000 + b"-1", "an unknown peer"),
        (b"engine-1-0-0", "an unknown peer"),
        (b"\x00\xff", "an unknown peer"),
    ],
)
def test_peers_are_named_for_people(identity: bytes, name: str) -> None:
    assert peer_name(identity) == name
