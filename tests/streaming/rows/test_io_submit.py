"""Bursts: many sockets written at once, and what the sockets do not take."""

from __future__ import annotations

import contextlib
import platform
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.streaming.rows.io_submit import BurstWriter, IoSubmitWriter, make_burst_writer, write_each

MORE_THAN_A_BATCH = 300


@pytest.fixture(params=["one by one", "submitted"], scope="module")
def burst(request: pytest.FixtureRequest) -> BurstWriter:
    if request.param == "one by one":
        return write_each
    try:
        return IoSubmitWriter(few=0)
    except OSError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """So many connections: the end that is written, which never blocks, and the client's."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            server, client = (stack.enter_context(end) for end in socket.socketpair())
            server.setblocking(False)
            client.settimeout(30)
            made.append((server, client))
        yield made


def written(burst: BurstWriter, descriptors: list[int], chunks: list[bytes]) -> list[tuple[int, int]]:
    sizes = np.array([len(chunk) for chunk in chunks], np.int64)
    return burst(np.array(descriptors, np.int64), b"".join(chunks), sizes)


def received(client: socket.socket) -> bytes:
    """All that was sent, after its sender has closed."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def fill(server: socket.socket) -> int:
    """Write until the socket takes no more. Returns how many bytes it took."""
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            taken += server.send(b"." * 4096)
    return taken


@pytest.mark.parametrize("count", [0, 1, 17, MORE_THAN_A_BATCH])
def test_every_socket_gets_its_chunk(burst: BurstWriter, count: int) -> None:
    with pairs(count) as connections:
        chunks = [b"%d." % index * (index % 7 + 1) for index in range(count)]
        for _ in range(2):
            assert written(burst, [server.fileno() for server, _ in connections], chunks) == []
        for (server, client), chunk in zip(connections, chunks, strict=True):
            server.close()
            assert received(client) == chunk * 2


def test_what_a_full_socket_does_not_take_is_told(burst: BurstWriter) -> None:
    with pairs(40) as connections:
        full, partly = 3, 20
        before = fill(connections[full][0])
        connections[partly][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        chunks = [b"abc"] * 40
        chunks[partly] = b"0123456789" * 100_000
        short = written(burst, [server.fileno() for server, _ in connections], chunks)
        assert [index for index, _ in short] == [full, partly]
        sent = dict(short)
        assert sent[full] == 0
        assert 0 <= sent[partly] < len(chunks[partly])
        for index, (server, client) in enumerate(connections):
            server.close()
            if index == full:
                assert received(client) == b"." * before
            else:
                assert received(client) == chunks[index][: sent.get(index, len(chunks[index]))]


def test_a_broken_socket_harms_no_other(burst: BurstWriter) -> None:
    with pairs(40) as connections:
        descriptors = [server.fileno() for server, _ in connections]
        connections[0][1].close()  # its client has gone
        connections[7][0].close()  # no descriptor any longer
        connections[8][0].close()
        connections[39][1].close()
        assert written(burst, descriptors, [b"abc"] * 40) == [(0, 0), (7, 0), (8, 0), (39, 0)]
        for index, (server, client) in enumerate(connections):
            if index not in (0, 7, 8, 39):
                server.close()
                assert received(client) == b"abc"


@given(
    steps=st.lists(
        st.tuples(st.lists(st.binary(max_size=3000), min_size=20, max_size=20), st.sets(st.integers(0, 19))),
        max_size=8,
    )
)
def test_nothing_is_lost_or_said_twice(burst: BurstWriter, steps: list[tuple[list[bytes], set[int]]]) -> None:
    """Clients that read now and then, and sockets that hold little: what is told and what arrives are all."""
    with pairs(20) as connections:
        for server, client in connections:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            client.setblocking(False)
        descriptors = [server.fileno() for server, _ in connections]
        expected = [bytearray() for _ in connections]
        arrived = [bytearray() for _ in connections]
        for chunks, readers in steps:
            missed = dict(written(burst, descriptors, chunks))
            for index, chunk in enumerate(chunks):
                expected[index] += chunk[: missed.get(index, len(chunk))]
            for index in readers:
                with contextlib.suppress(BlockingIOError):
                    arrived[index] += connections[index][1].recv(2000)
        for index, (server, client) in enumerate(connections):
            server.close()
            client.setblocking(True)
            arrived[index] += received(client)
        assert arrived == expected


def test_a_machine_without_the_system_call_writes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(OSError, match="io_submit"):
        IoSubmitWriter()
    assert make_burst_writer() is write_each


def test_the_kernels_refusal_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.streaming.rows.io_submit._NUMBERS", {platform.machine(): (10**6, 10**6, 10**6)}
    )
    with pytest.raises(OSError, match=r"io_setup\(2\): Function not implemented"):
        IoSubmitWriter()
