"""Server-sent events: the same however the stream is cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.streaming.sse_parser import SSEError, SSEParser


@pytest.mark.parametrize(
    ("received", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\r\n\r\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": ping\n\nevent: x\nid: 1\ndata: a\n\n", [b"a"]),
        (b"data: a\n", []),
        (b"data\n\n", [b""]),
        (b"\n\n\n", []),
    ],
)
def test_events_of_a_stream(received: bytes, events: list[bytes]) -> None:
    assert [event.data for event in SSEParser().feed(received) if event.data is not None] == events


@given(
    st.lists(st.sampled_from([b"\r", b"\n", b"data:", b" ", b"x", b":", b"\xef\xbb\xbf", b"event: e"])),
    st.data(),
)
def test_events_are_the_same_however_they_are_cut(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    whole = SSEParser()
    expected = [(event.data, event.name) for event in whole.feed(raw) if event.data is not None]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    parser = SSEParser()
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        events += parser.feed(raw[start:end])
    assert [(event.data, event.name) for event in events if event.data is not None] == expected
    assert b"".join(event.raw for event in events) + parser.pending == raw


def test_an_endless_event_is_refused() -> None:
    parser = SSEParser(max_event_bytes=100)
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(SSEError, match="more than 100 bytes"):
        parser.feed(b"x" * 10)
