"""Replies are read alike however they are cut, and what is no reply is refused."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.http1.reply_reader import MAX_OVERHEAD_BYTES, ReplyFault, ReplyReader

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nt: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world"
INTERIM = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n"


class Reading:
    def __init__(self, *, bodyless: bool = False) -> None:
        self.heads: list[tuple[int, list[tuple[bytes, bytes]]]] = []
        self.reader = ReplyReader(lambda status, headers: self.heads.append((status, headers)))
        self.reader.begin(bodyless=bodyless)
        self.body = b""

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.body += self.reader.feed(piece)


@pytest.mark.parametrize("reply", [CHUNKED, INTERIM + CHUNKED, SIZED, INTERIM * 3 + SIZED])
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_replies_do_not_depend_on_how_they_are_cut(reply: bytes, cuts: list[int]) -> None:
    reading = Reading()
    edges = sorted({0, len(reply), *(cut % len(reply) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        assert not reading.reader.complete
        reading.feed(reply[start:end])
    assert (reading.body, reading.reader.complete, reading.reader.keeps_alive) == (b"hello world", True, True)
    [(status, headers)] = reading.heads
    assert status == 200
    assert headers[0][0] in (b"transfer-encoding", b"content-length")
    assert not reading.reader.ends_with_connection


def test_one_reply_follows_the_other() -> None:
    reading = Reading()
    for _ in range(3):
        reading.feed(CHUNKED)
        assert reading.reader.complete
        reading.reader.begin(bodyless=False)
    assert reading.body == b"hello world" * 3


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reading = Reading()
    reading.feed(b"HTTP/1.1 200 OK\r\n\r\n", b"hello")
    assert (reading.body, reading.reader.complete) == (b"hello", False)
    assert reading.reader.ends_with_connection


def test_the_reply_to_head_has_no_body() -> None:
    reading = Reading(bodyless=True)
    reading.feed(SIZED)
    assert (reading.body, reading.reader.complete, reading.reader.keeps_alive) == (b"", True, False)


@pytest.mark.parametrize("more", [b"x", SIZED, b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_what_follows_a_reply_ends_the_connection(more: bytes) -> None:
    reading = Reading()
    reading.feed(SIZED + more)
    assert (reading.body, reading.reader.complete, reading.reader.keeps_alive) == (
        b"hello world",
        True,
        False,
    )


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.7\r\n\r\n", "not HTTP/1.1"),
        (b"\x15\x03\x01\x00\x02", "it speaks TLS"),
        (b"HTTP/1.1 000 x\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 101 x\r\nUpgrade: y\r\nConnection: upgrade\r\n\r\nhello", "it switched protocols"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "not HTTP/1.1"),
        (CHUNKED.replace(b"6;x=y", b"zz"), "not HTTP/1.1"),
    ],
)
def test_what_is_no_reply_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(ReplyFault, match=reason):
        Reading().feed(sent)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED[: CHUNKED.index(b"t: 1")]])
def test_what_is_no_content_is_bounded(begin: bytes) -> None:
    reading = Reading()
    endless = b"a: b\r\n" if begin else INTERIM
    with pytest.raises(ReplyFault):
        reading.feed(begin, *[endless * 100] * (2 * MAX_OVERHEAD_BYTES // len(endless * 100)))


def test_replies_leave_nothing_to_the_garbage_collector() -> None:
    reading = Reading()
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            reading.feed(CHUNKED)
            reading.reader.begin(bodyless=False)
        parsers = [each for each in gc.get_objects() if type(each).__name__ == "HttpResponseParser"]
        gone = weakref.ref(reading)
        reading.reader.close()
        del reading
        assert gone() is None
    finally:
        gc.enable()
    assert len(parsers) <= 1
