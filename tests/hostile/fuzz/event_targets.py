"""What parses server-sent events: the parser itself, and the gateway's observer of streams."""

from __future__ import annotations

import re

from penstock.gateway.responses.event_reader import ContentError, read_event, read_reply
from penstock.gateway.responses.response_observer import ReplyObserver, StreamObserver
from penstock.streaming.sse_parser import Event, SSEParser
from tests.hostile.fuzz.byte_source import ByteSource

_LINE_END = re.compile(rb"\r\n|\n|\r")


def expected_events(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Data and name of each event, by the standard's algorithm for a whole stream."""
    found = []
    data: list[bytes] = []
    name = b""
    for line in _LINE_END.split(stream.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value
            continue
        if data:
            found.append((b"\n".join(data), name))
        data, name = [], b""
    return found


def _with_data(events: list[Event]) -> list[tuple[bytes, bytes]]:
    return [(event.data, event.name) for event in events if event.data is not None]


def _parsed(pieces: list[bytes]) -> tuple[list[Event], bytes]:
    parser = SSEParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events, parser.pending


def sse(data: bytes) -> None:
    """Events are those of the standard, however the stream is cut, and their raw bytes are the stream."""
    source = ByteSource(data)
    cut_at, stream = source.take(14), source.rest()
    expected = expected_events(stream)
    for pieces in ([stream], ByteSource(cut_at).pieces(stream)):
        events, pending = _parsed(pieces)
        assert b"".join([event.raw for event in events]) + pending == stream
        assert _with_data(events) == expected, (_with_data(events), expected)


def _observed(pieces: list[bytes], *, strip: bool) -> tuple[StreamObserver, bytes]:
    observer = StreamObserver(strip_usage=strip)
    passed = b"".join([observer.feed(piece, float(at)) for at, piece in enumerate(pieces)])
    return observer, passed + observer.finish(100.0)


def observer(data: bytes) -> None:
    """The gateway passes a stream on as it is (but for its usage event), and counts the same, however it was
    cut. What it cannot read is a problem of the content, never an exception."""
    source = ByteSource(data)
    cut_at, stream = source.take(14), source.rest()
    pieces = ByteSource(cut_at).pieces(stream)
    for strip in (False, True):
        whole, passed = _observed([stream], strip=strip)
        cut, cut_passed = _observed(pieces, strip=strip)
        assert strip or passed == cut_passed == stream
        if whole.seen.content_problem is None and not whole.seen.unread:
            assert _with_data(_parsed([cut_passed])[0]) == _with_data(_parsed([passed])[0])
        for name in ("token_events", "usage", "error", "ended", "content_problem", "unread"):
            one, other = getattr(whole.seen, name), getattr(cut.seen, name)
            assert one == other, f"{name}: {one!r} and {other!r}"
    reply = ReplyObserver()
    reply.feed(stream, 0.0)
    reply.finish(0.0)
    for read in (read_event, read_reply):
        try:
            read(stream)
        except ContentError:
            continue
