"""Replies are counted right however the network cuts them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.load.http1 import Http1Reply
from tests.bench.conftest import DONE, EVENT, HEAD, LAST_CHUNK, chunk, refusal, stream

ERROR_EVENT = b'data: {"error":{"message":"engine 0 died","code":500}}\n\n'


def feed(reply: Http1Reply, data: bytes, cuts: list[int]) -> int:
    """Feeds ``data`` in pieces; returns the events counted."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return sum(reply.feed(data[start:end]) for start, end in itertools.pairwise(edges))


cuts = st.lists(st.integers(0, 10_000), max_size=60)


@given(st.integers(0, 5), cuts)
def test_every_event_counts_once(events: int, cuts: list[int]) -> None:
    reply = Http1Reply()
    assert feed(reply, stream(events), cuts) == events
    assert (reply.ended, reply.error, reply.reusable) == (True, None, True)


@given(st.integers(1, 4), cuts)
def test_an_end_in_the_middle_is_an_error(missing: int, cuts: list[int]) -> None:
    reply = Http1Reply()
    feed(reply, stream(2)[:-missing], cuts)
    assert not reply.ended
    reply.close()
    assert reply.ended
    assert reply.error == "the connection ended before the reply did"


@given(cuts)
def test_an_error_event_is_an_error(cuts: list[int]) -> None:
    reply = Http1Reply()
    data = HEAD + chunk(EVENT) + chunk(ERROR_EVENT) + chunk(DONE) + LAST_CHUNK
    assert feed(reply, data, cuts) == 2
    assert reply.ended
    assert reply.error == 'error event: {"error":{"message":"engine 0 died","code":500}}'


@given(cuts)
def test_a_refusal_is_an_error_with_its_body(cuts: list[int]) -> None:
    reply = Http1Reply()
    assert feed(reply, refusal(b"400 Bad Request", b'{"error": "max_tokens"}'), cuts) == 0
    assert reply.ended
    assert reply.error == 'HTTP 400: {"error": "max_tokens"}'


def test_a_chunked_refusal_shows_its_body() -> None:
    reply = Http1Reply()
    reply.feed(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"too busy") + LAST_CHUNK)
    assert reply.error == "HTTP 503: too busy"


def test_an_end_without_done_is_an_error() -> None:
    reply = Http1Reply()
    reply.feed(HEAD + chunk(EVENT) + LAST_CHUNK)
    assert reply.error == "the reply ended without its terminator"


def test_no_reply_is_an_error() -> None:
    reply = Http1Reply()
    reply.close()
    assert reply.error == "closed without a reply"


def test_something_else_than_http_is_an_error() -> None:
    reply = Http1Reply()
    reply.feed(b"SSH-2.0-OpenSSH_9.7\r\n\r\n")
    assert reply.ended
    assert reply.error == "not an HTTP/1.1 reply: b'SSH-2.0-OpenSSH_9.7'"


def test_a_reply_without_chunks_ends_with_its_connection() -> None:
    reply = Http1Reply()
    assert reply.feed(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + EVENT + DONE) == 1
    assert not reply.ended
    reply.close()
    assert (reply.ended, reply.error, reply.reusable) == (True, None, False)


def test_a_reply_of_given_length_ends_there() -> None:
    reply = Http1Reply()
    data = EVENT + EVENT + DONE
    assert reply.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data) == 2
    assert (reply.ended, reply.error, reply.in_stream) == (True, None, False)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (HEAD[:-1], False),
        (HEAD, True),
        (HEAD + chunk(EVENT), True),
        (HEAD + chunk(EVENT)[:-5], False),
        (HEAD + chunk(EVENT) + chunk(DONE), False),
        (HEAD + chunk(ERROR_EVENT), False),
        (refusal(b"200 OK", b"abc")[:-1], False),
    ],
)
def test_only_between_whole_events_may_reads_be_counted_without_it(data: bytes, expected: bool) -> None:
    reply = Http1Reply()
    reply.feed(data)
    assert reply.in_stream is expected
