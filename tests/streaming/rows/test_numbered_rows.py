"""Numbered and collected events, and guarded rows: however rows are written, none is missed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.rows.row_writer import Path, RowWriter
from penstock.streaming.stream import Stream
from tests.streaming.rows.test_row_writer import TEXTS, Connection, Desk

LARGE = 1 << 20


class RecordingDesk(Desk):
    """Streams of three kinds: recorded ones (0, 3, …), recorded and guarded ones (1, 4, …), and others. The
    replies of guarded ones must see token 1."""

    def __init__(self, count: int, chunks: bool) -> None:
        super().__init__([LARGE] * count, [LARGE, LARGE])
        texts = np.array(TEXTS, np.object_)
        unsafe = np.array([False, True, False, False])
        self.writer = RowWriter(
            self.streams, texts, self._burst, self.windows, self._reply, self._fault, unsafe
        )
        for handle, stream in enumerate(self.streams):
            assert stream is not None
            path = stream.write_target
            stream.write_target, stream.write_targets = None, self.writer
            stream.record = EventRecord() if handle % 3 < 2 else None
            stream.write_plain_rows(
                WriteTarget(descriptor=handle) if chunks else path, guarded=handle % 3 == 1
            )

    def _reply(self, stream: Stream, *row: object) -> None:
        """As a reply does: an event of its own."""
        super()._reply(stream)
        tokens: list[int] = row[0]  # type: ignore[assignment]
        stream.write(stream.event(text_of(tokens)))

    def written(self) -> dict[int, bytes]:
        """All events by stream, in the order of writing per path."""
        found = dict.fromkeys(range(len(self.streams)), b"")
        for connection in self.connections:
            for handle, event in connection.events():
                found[handle] += event
        for descriptors, data in self.bursts:
            for descriptor in descriptors:
                size, _, data = data.partition(b"\r\n")
                event, data = data[: int(size, 16)], data[int(size, 16) + 2 :]
                found[descriptor] += event
        for handle, event in self.alone:
            found[handle] += event
        return found


def text_of(tokens: list[int]) -> bytes:
    return b"".join(b"?" if TEXTS[token] is None else TEXTS[token] for token in tokens)


def numbers(events: bytes) -> list[int]:
    return sorted(int(number) for number in re.findall(rb'"sequence_number":(\d+)', events))


@given(st.integers(1, 9), st.booleans(), st.booleans(), st.sampled_from([1, 3, 8]), st.data())
def test_every_event_has_the_next_number_and_its_text_is_collected(
    count: int, chunks: bool, continued: bool, most: int, data: st.DataObject
) -> None:
    desk = RecordingDesk(count, chunks)
    expected = dict.fromkeys(range(count), b"")
    events = dict.fromkeys(range(count), 0)
    unchanged = desk.unchanged(range(count)) if continued else None
    for _ in range(5):
        rows = [
            (handle, data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=most)))
            for handle in range(count)
        ]
        desk.rows(*rows, unchanged=unchanged)
        for handle, tokens in rows:
            events[handle] += 1
            expected[handle] += text_of(tokens)
    for handle, stream in enumerate(desk.streams):
        assert stream is not None
        assert desk.writer.path(handle) >= Path.CHUNK
        stream.stop_plain_rows()
        record, written = stream.record, desk.written()[handle]
        if record is None:
            assert not numbers(written)
            continue
        assert record.number == events[handle]
        assert numbers(written) == list(range(events[handle]))
        if handle % 3 == 1:
            assert all(b"bc" not in event for _, event in _columns(desk.connections, handle))
        assert bytes(record.text) == expected[handle]


def _columns(connections: list[Connection], handle: int) -> list[tuple[int, bytes]]:
    return [each for connection in connections for each in connection.events() if each[0] == handle]


def test_the_text_is_collected_in_order() -> None:
    desk = RecordingDesk(1, chunks=True)
    desk.rows((0, [0]))
    desk.rows((0, [1, 0]))
    desk.rows((0, [1]))
    stream = desk.streams[0]
    assert stream is not None
    assert stream.record is not None
    assert bytes(stream.record.text) == b"abcabc"
    assert stream.record.number == 3
    assert desk.written()[0] == (
        b'<a","sequence_number":0><bca","sequence_number":1><bc","sequence_number":2>'
    )


@pytest.mark.parametrize("chunks", [True, False])
def test_a_path_that_is_chosen_again_goes_on_counting(chunks: bool) -> None:
    desk = RecordingDesk(1, chunks)
    stream = desk.streams[0]
    assert stream is not None
    for _ in range(3):
        desk.rows((0, [0]))
        desk.rows((0, [0]))
        stream.write_plain_rows(stream.write_target)  # as after a sign of life
    assert numbers(desk.written()[0]) == list(range(6))
    stream.stop_plain_rows()
    assert stream.record is not None
    assert (stream.record.number, bytes(stream.record.text)) == (6, b"a" * 6)


def test_guarded_tokens_are_seen_by_the_reply() -> None:
    desk = RecordingDesk(3, chunks=False)
    desk.rows((0, [1]), (1, [1]), (2, [1]))
    assert desk.slow == [1]
    desk.rows((0, [0]), (1, [0]), (2, [0]))
    assert desk.slow == [1]
    assert desk.writer.path(1) == Path.FRAME


def test_a_new_head_is_taken_when_rows_become_plain_again() -> None:
    desk = RecordingDesk(1, chunks=True)
    stream = desk.streams[0]
    assert stream is not None
    path = stream.write_target
    stream.stop_plain_rows()
    stream.set_event(b"[", b">")
    stream.write_plain_rows(path)
    desk.rows((0, [0]))
    assert desk.written()[0] == b'[a","sequence_number":0>'


def test_events_of_the_reply_itself_are_counted_between_rows() -> None:
    desk = RecordingDesk(1, chunks=True)
    stream = desk.streams[0]
    assert stream is not None
    assert stream.record is not None
    desk.rows((0, [0]))
    stream.record.number += 3  # the reply ends an item and begins another
    desk.rows((0, [0]))
    assert numbers(desk.written()[0]) == [0, 4]
    assert stream.record.number == 5
