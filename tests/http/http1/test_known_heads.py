"""Heads that come again."""

from __future__ import annotations

import pytest

from penstock.http.errors import ApiError
from penstock.http.http1.known_heads import MAX_HEADS, _known, read_head
from penstock.http.http1.request_head import parse_head


def head(length: object, *, name: str = "Content-Length", more: str = "") -> bytes:
    return f"POST /a?b=1 HTTP/1.1\r\nHost: x\r\n{name}: {length}\r\nX-Of: known heads\r\n{more}\r\n".encode()


def test_heads_that_differ_in_their_length_are_parsed_as_any_other() -> None:
    first, second = read_head(head(5)), read_head(head(70))
    for read, given in ((first, head(5)), (second, head(70)), (read_head(head(5)), head(5))):
        assert read._replace(derived=None) == parse_head(given)
    assert second.length == 70
    assert first.length == 5
    assert first.derived is not None
    assert first.derived is second.derived


def test_what_is_derived_is_of_one_head() -> None:
    others = [head(5, more="X-B: 1\r\n"), head(5, name="content-length"), head(" 5"), head("5 ")]
    derived = [id(read_head(each).derived) for each in (head(5), *others)]
    assert len(set(derived)) == len(derived)


@pytest.mark.parametrize(
    "like",
    [
        head(""),
        head("\0"),
        head("5", more="Content-Length: 5\r\n"),
        head("", more="Content-Length: 5\r\n"),
        head("5", more="Transfer-Encoding: chunked\r\n"),
        head("+5"),
        head("5,5"),
        head("9" * 19),
    ],
)
def test_no_head_is_taken_for_a_known_one(like: bytes) -> None:
    """It would hide a request behind another one's body."""
    for known in (head(5), head(5, more="X-C: 1\r\n")):
        read_head(known)
    with pytest.raises(ApiError):
        read_head(like)
    with pytest.raises(ApiError):
        read_head(like)


def test_only_so_many_are_remembered() -> None:
    for number in range(3 * MAX_HEADS):
        read_head(head(1, more=f"X-Number: {number}\r\n"))
    assert len(_known) <= MAX_HEADS
    long = head(1, more=f"X-Long: {'x' * 8000}\r\n")
    assert read_head(long).derived is None
