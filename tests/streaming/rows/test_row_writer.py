"""Rows as frames of HTTP/2 connections: one write per connection, within the windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.row_writer import Path, RowWriter
from penstock.streaming.rows.unchanged_batch import UnchangedBatch
from penstock.streaming.stream import Stream
from penstock.wire.frames import FinishReason, TokenFrame
from tests.streaming.test_output_processor import RecordingReply

TEXTS = [b"a", b"bc", b"", None]
HEAD, TAIL = b"<", b">"


class Connection:
    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write_frames(self, frames: bytes) -> None:
        self.writes.append(frames)

    def events(self) -> list[tuple[int, bytes]]:
        """Stream id and payload of each frame that was written."""
        found, data = [], b"".join(self.writes)
        while data:
            size = int.from_bytes(data[:3], "big")
            assert data[3:5] == b"\0\0"
            found.append((int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
            data = data[9 + size :]
        return found


class Desk:
    """Streams of some connections, and what reaches them other than by columns."""

    def __init__(self, stream_windows: Sequence[int], connection_windows: Sequence[int]) -> None:
        self.windows = FlowWindows(2, 1)
        self.connections = [Connection() for _ in connection_windows]
        slots = [
            self.windows.add_connection(connection, window)
            for connection, window in zip(self.connections, connection_windows, strict=True)
        ]
        self.alone: list[tuple[int, bytes]] = []
        """Handle and event of rows that were written by the sink."""
        self.slow: list[int] = []
        """Handles of rows that the reply got."""
        self.bursts: list[tuple[list[int], bytes]] = []
        self.streams: list[Stream | None] = []
        self.positions = [1] * len(stream_windows)
        for handle in range(len(stream_windows)):
            stream = Stream(RecordingReply(), 0, 0, self._write(handle), HEAD, TAIL)
            stream.handle = handle
            self.streams.append(stream)
        texts = np.array(TEXTS, np.object_)
        self.writer = RowWriter(self.streams, texts, self._burst, self.windows, self._reply, self._fault)
        for handle, window in enumerate(stream_windows):
            connection = handle % len(slots)
            slot = self.windows.add_stream(slots[connection], window)
            stream = self.streams[handle]
            assert stream is not None
            stream.write_targets = self.writer
            prefix = b"\0\0" + handle.to_bytes(4, "big")
            self.choose(handle, WriteTarget(window=slot, prefix=prefix))

    def choose(self, handle: int, path: WriteTarget | None) -> None:
        stream = self.streams[handle]
        assert stream is not None
        self.writer.choose(stream, path, guarded=False)

    def _write(self, handle: int):
        return lambda data: self.alone.append((handle, data))

    def _burst(self, descriptors, data, sizes):
        self.bursts.append((descriptors.tolist(), data))
        return []

    def _reply(self, stream: Stream, *row: object) -> None:
        self.slow.append(stream.handle)

    def _fault(self, stream: Stream) -> None:
        raise AssertionError("no stream is at fault")

    def unchanged(self, handles: Sequence[int]) -> UnchangedBatch:
        """A frame of one token each, which the next rows of these streams continue."""
        ones = np.ones(len(handles), np.int32)
        position = np.array([self.positions[handle] for handle in handles], np.int32) - ones
        stream = np.array(handles, np.int32)
        return UnchangedBatch(
            TokenFrame(step=0, stream=stream, position=position, tokens=ones), 0.0, None, 10_000
        )

    def rows(
        self,
        *rows: tuple[int, list[int]],
        finish: list[int] | None = None,
        unchanged: UnchangedBatch | None = None,
    ) -> None:
        """``unchanged``: what the rows continue."""
        counts = [len(tokens) for _, tokens in rows]
        frame = TokenFrame(
            step=1,
            stream=np.array([handle for handle, _ in rows], np.int32),
            position=np.array([self.positions[handle] for handle, _ in rows], np.int32),
            tokens=np.array([token for _, tokens in rows for token in tokens], np.int32),
            count=None if set(counts) == {1} else np.array(counts, np.int32),
            finish=None if finish is None else np.array(finish, np.int8),
        )
        for handle, tokens in rows:
            self.positions[handle] += len(tokens)
        assert unchanged is None or unchanged.continue_with(frame)
        self.writer.write(frame, np.array(TEXTS, np.object_).take(frame.tokens), unchanged)

    def left(self) -> tuple[list[int], list[int]]:
        """Of the windows of streams and connections."""
        slots = [~int(self.writer._targets[handle]) for handle in range(len(self.streams))]
        return [int(self.windows.streams[slot]) for slot in slots], [
            int(window) for window in self.windows.connections[: len(self.connections)]
        ]


def test_a_step_is_one_write_per_connection() -> None:
    desk = Desk([100] * 5, [1000, 1000])
    desk.rows(*((handle, [handle % 2]) for handle in (3, 0, 4, 1, 2)))
    assert [len(connection.writes) for connection in desk.connections] == [1, 1]
    assert desk.connections[0].events() == [(0, b"<a>"), (4, b"<a>"), (2, b"<a>")]
    assert desk.connections[1].events() == [(3, b"<bc>"), (1, b"<bc>")]
    assert desk.left() == ([97, 96, 97, 96, 97], [991, 992])


def test_rows_of_several_tokens_are_one_frame_each() -> None:
    desk = Desk([100] * 3, [1000, 1000])
    desk.rows((0, [0, 1]), (1, [1]), (2, [0, 0, 2, 1]))
    assert desk.connections[0].events() == [(0, b"<abc>"), (2, b"<aabc>")]
    assert desk.connections[1].events() == [(1, b"<bc>")]


def test_what_a_window_has_no_room_for_is_left_to_the_sink() -> None:
    desk = Desk([100, 2, 100], [1000])
    desk.rows((0, [0]), (1, [0]), (2, [0]))
    assert desk.connections[0].events() == [(0, b"<a>"), (2, b"<a>")]
    assert desk.alone == [(1, b"<a>")]
    assert desk.left() == ([97, 2, 97], [994])


def test_a_connection_without_room_leaves_all_its_rows_to_their_sinks_and_others_are_written() -> None:
    desk = Desk([100] * 4, [5, 1000])
    desk.rows(*((handle, [0]) for handle in range(4)))
    assert desk.connections[0].writes == []
    assert desk.connections[1].events() == [(1, b"<a>"), (3, b"<a>")]
    assert desk.alone == [(0, b"<a>"), (2, b"<a>")]
    assert desk.left() == ([100, 97, 100, 97], [5, 994])


def test_messages_chunks_and_frames_of_one_step() -> None:
    desk = Desk([100] * 4, [1000])
    for handle in (1, 3):
        stream = desk.streams[handle]
        assert stream is not None
        stream.set_event(b'event: delta\ndata: {"text":"', b'"}\n\n')
        desk.choose(handle, WriteTarget(descriptor=handle, messages=True))
    desk.choose(2, WriteTarget(descriptor=2))
    for _ in range(2):
        desk.rows((0, [0]), (1, [1]), (2, [0]), (3, [0, 1]))
    message, long = b'\x81\x0d{"text":"bc"}', b'\x81\x0e{"text":"abc"}'
    assert desk.bursts == [([1, 2, 3], message + b"3\r\n<a>\r\n" + long)] * 2
    assert desk.connections[0].events() == [(0, b"<a>")] * 2
    desk.choose(3, None)
    desk.rows((1, [1]), (3, [0]))
    assert desk.bursts[2:] == [([1], message)]
    assert desk.alone == [(3, b'event: delta\ndata: {"text":"a"}\n\n')]
    desk.choose(1, WriteTarget(descriptor=1))  # the next request of the socket is plain HTTP
    desk.rows((1, [1]))
    assert desk.bursts[3:] == [([1], b'22\r\nevent: delta\ndata: {"text":"bc"}\n\n\r\n')]


def test_chunks_and_frames_of_one_step() -> None:
    desk = Desk([100] * 3, [1000])
    desk.choose(1, WriteTarget(descriptor=9))
    desk.rows((0, [0]), (1, [1]), (2, [0]))
    assert desk.connections[0].events() == [(0, b"<a>"), (2, b"<a>")]
    assert desk.bursts == [([9], b"4\r\n<bc>\r\n")]


@pytest.mark.parametrize("finish", [None, [0, FinishReason.LENGTH, 0, 0]])
def test_other_rows_of_a_step_go_their_own_way(finish: list[int] | None) -> None:
    desk = Desk([100] * 4, [1000])
    desk.writer.stop(2)
    desk.choose(3, None)
    desk.rows((0, [0]), (1, [3]), (2, [0]), (3, [0]), finish=finish)
    assert desk.connections[0].events() == [(0, b"<a>")]
    assert desk.slow == [1, 2]
    assert desk.alone == [(3, b"<a>")]
    assert [desk.writer.path(handle) for handle in (0, 2, 3)] == [Path.FRAME, Path.REPLY, Path.SINK]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.data(),
)
def test_no_row_is_lost_or_doubled_and_no_window_is_exceeded(
    stream_windows: list[int], connection_windows: list[int], data: st.DataObject
) -> None:
    desk = Desk(stream_windows, connection_windows)
    expected = dict.fromkeys(range(len(stream_windows)), b"")
    for _ in range(3):
        handles = data.draw(st.permutations(range(len(stream_windows))))
        rows = [
            (handle, data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))) for handle in handles
        ]
        desk.rows(*rows)
        for handle, tokens in rows:
            expected[handle] += HEAD + b"".join(TEXTS[token] or b"" for token in tokens) + TAIL
    seen = dict.fromkeys(expected, 0)
    for connection in desk.connections:
        for handle, event in connection.events():
            seen[handle] += len(event)
    for handle, event in desk.alone:
        seen[handle] += len(event)
    assert seen == {handle: len(text) for handle, text in expected.items()}
    streams, connections = desk.left()
    assert min(streams) >= 0
    assert min(connections) >= 0


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.data(),
)
def test_frames_of_the_same_streams_are_written_as_others_are(
    stream_windows: list[int], connection_windows: list[int], data: st.DataObject
) -> None:
    """Also when windows are used up, and when streams take another path meanwhile."""
    desks = [Desk(stream_windows, connection_windows) for _ in range(2)]
    handles = data.draw(st.permutations(range(len(stream_windows))))
    unchanged = desks[0].unchanged(handles)
    for _ in range(4):
        most = data.draw(st.sampled_from([1, 3, 8, 40]))
        alike = data.draw(st.booleans())  # as many tokens in each row
        tokens = st.lists(st.integers(0, 3), min_size=most if alike else 1, max_size=most)
        rows = [(handle, data.draw(tokens)) for handle in handles]
        for desk, rest in zip(desks, (unchanged, None), strict=True):
            desk.rows(*rows, unchanged=rest)
        if data.draw(st.booleans()):
            changed = data.draw(st.sampled_from(handles))
            for desk in desks:
                desk.writer.stop(changed)
    first, second = desks
    assert [each.events() for each in first.connections] == [each.events() for each in second.connections]
    assert (first.alone, first.slow, first.left()) == (second.alone, second.slow, second.left())


def test_one_very_long_row_leaves_no_array_of_empty_cells() -> None:
    desk = Desk([10_000] * 20, [10_000])
    unchanged = desk.unchanged(range(20))
    desk.rows(*((handle, [0] * 3) for handle in range(20)), unchanged=unchanged)
    assert unchanged.columns is not None
    assert unchanged.columns.grid.width == 3
    desk.rows((0, [1] * 500), *((handle, [0]) for handle in range(1, 20)), unchanged=unchanged)
    assert unchanged.columns.grid.width == 1  # texts are joined
    events = [(0, b"<aaa>"), (0, b"<" + 500 * b"bc" + b">")]
    assert [each for each in desk.connections[0].events() if each[0] == 0] == events
    desk.rows(*((handle, [0] * 2) for handle in range(20)), unchanged=unchanged)
    assert unchanged.columns.grid.width == 2
    assert desk.connections[0].events()[-1] == (19, b"<aa>")
