"""What is seen of a reply, however its bytes arrive."""

from __future__ import annotations

import pytest

from tests.soak.received_reply import ReceivedReply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"index":0,"text":"ab","token_ids":[1,2]}]}\n\n',
    b'data: {"choices":[{"index":1,"delta":{"content":"x"}}]}\n\n',
    b": keep-alive\n\n",
    b'data: {"choices":[{"index":0,"text":"c","token_ids":[3],"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":4}}\n\n',
    b"data: [DONE]\n\n",
]


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream(size: int) -> None:
    seen = ReceivedReply()
    data = chunked(*EVENTS)
    for start in range(0, len(data), size):
        assert not seen.whole
        seen.feed(data[start : start + size])
    assert (seen.status, seen.whole, seen.reusable, seen.done, seen.error) == (200, True, True, True, "")
    assert dict(seen.texts) == {0: "abc", 1: "x"}
    assert seen.tokens[0] == [1, 2, 3]
    assert seen.finish_reasons == {0: "length"}
    assert seen.usage is not None
    assert seen.usage.completion_tokens == 4
    assert seen.events == 5  # [DONE] is one


def test_a_body() -> None:
    body = b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{}}'
    seen = ReceivedReply()
    seen.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
    assert (seen.whole, seen.reusable, seen.texts[0], seen.finish_reasons) == (True, False, "hi", {0: "stop"})


def test_a_refusal() -> None:
    body = b'{"error":{"message":"no","code":400}}'
    seen = ReceivedReply()
    seen.feed(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    assert (seen.status, seen.whole) == (400, True)
    assert "no" in seen.error


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (chunked(b'data: {"error":{"message":"broken"}}\n\n'), "broken"),
        (chunked(b"data: [DONE]\n\n", b"data: {}\n\n"), r"an event after \[DONE\]"),
        (chunked(b"data: nonsense\n\n"), "malformed"),
        (chunked(b"data: [DONE]\n\n") + b"HTTP", "bytes after the reply"),
        (b"nonsense\r\n", "not HTTP"),
    ],
)
def test_what_is_wrong(data: bytes, error: str) -> None:
    seen = ReceivedReply()
    for byte in data:
        seen.feed(bytes([byte]))
    with pytest.raises(AssertionError, match=error):
        assert not seen.error, seen.error
