"""Splitting bytes into requests: the same requests however the bytes are cut, and nothing but ApiError."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.errors import ApiError
from penstock.http.http1.chunked_body import CHUNKS_PER_TURN
from penstock.http.http1.request_reader import RequestReader

PLAIN = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"\r\nPOST /%61 HTTP/1.1\r\nhost:x\r\nX-A: b \r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x=y\r\nhel\r\n02\r\nlo\r\n0\r\nX-Trailer: t\r\n\r\n"
)
SHORT = b"GET / HTTP/1.0\r\n\r\n"


class Request(NamedTuple):
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def read_all(pieces: list[bytes], max_head_bytes: int = 4096) -> list[Request]:
    """The requests in ``pieces``. Raises ApiError."""
    reader = RequestReader(max_head_bytes)
    found = []
    head, body = None, b""
    for piece in pieces:
        reader.receive(piece)
        while True:
            if head is None:
                head, body = reader.read_head(), b""
                if head is None:
                    break
            body += reader.read_body()
            while reader.has_more:
                body += reader.read_body()
            if not reader.body_complete:
                break
            found.append(Request(head.method, head.path, head.headers, body))
            head = None
    return found


@given(st.lists(st.sampled_from([PLAIN, CHUNKED, SHORT]), max_size=4), st.lists(st.integers(0, 400)))
def test_requests_do_not_depend_on_how_their_bytes_are_cut(requests: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(requests)
    at = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    pieces = [sent[start:end] for start, end in itertools.pairwise(at)]
    expected = {
        PLAIN: Request("POST", "/a", [(b"host", b"x"), (b"content-length", b"5")], b"hello"),
        CHUNKED: Request(
            "POST", "/a", [(b"host", b"x"), (b"x-a", b"b"), (b"transfer-encoding", b"chunked")], b"hello"
        ),
        SHORT: Request("GET", "/", [], b""),
    }
    assert read_all(pieces) == [expected[each] for each in requests]
    assert read_all([bytes([byte]) for byte in sent]) == [expected[each] for each in requests]


_SPACES = [b"\r\n", b"\r", b"\n", b" ", b":", b";", b"\x00", b"\xff", b"\r\n\r\n"]
_WORDS = [b"0", b"5", b"ffff", b"GET / HTTP/1.1", b"Host: x", b"HTTP/1.1", b"0\r\n\r\n"]
_FRAMING = [b"Content-Length: ", b"Transfer-Encoding: chunked", PLAIN, CHUNKED]
FRAGMENTS = st.sampled_from([*_SPACES, *_WORDS, *_FRAMING])


@given(st.lists(FRAGMENTS | st.binary(max_size=20), max_size=30))
def test_foreign_bytes_give_requests_or_an_error_and_the_same_when_cut(pieces: list[bytes]) -> None:
    def outcome(of: list[bytes]) -> list[Request] | int:
        try:
            return read_all(of)
        except ApiError as error:
            return error.status

    whole, cut = outcome([b"".join(pieces)]), outcome(pieces)
    if isinstance(whole, list):  # of what is cut, the beginning is checked before the end has come
        assert whole == cut or isinstance(cut, int)
    else:
        assert isinstance(cut, int)


@pytest.mark.parametrize("size", [4096, 4097])
def test_a_head_has_its_limit(size: int) -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX: "
    head += b"y" * (size - len(head) - 4) + b"\r\n\r\n"
    for pieces in ([head], [head[:-1], head[-1:]], [head + PLAIN]):
        if size == 4096:
            assert read_all(pieces)
        else:
            with pytest.raises(ApiError) as refused:
                read_all(pieces)
            assert refused.value.status == 431


def test_tiny_chunks_take_turns() -> None:
    reader = RequestReader(4096)
    reader.receive(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert reader.read_head() is not None
    reader.receive(b"1\r\nx\r\n" * (2 * CHUNKS_PER_TURN + 1) + b"0\r\n\r\n")
    sizes = [len(reader.read_body())]
    while reader.has_more:
        sizes.append(len(reader.read_body()))
    assert sum(sizes) == 2 * CHUNKS_PER_TURN + 1
    assert max(sizes) <= CHUNKS_PER_TURN
    assert reader.body_complete
