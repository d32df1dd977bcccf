"""Frames with the same streams as the ones before: recognized as such, and refused as any other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.write_target import WriteTarget
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.engine_faults import (
    INVALID_TOKEN,
    OUT_OF_ORDER,
    TOO_MANY_TOKENS,
    UNKNOWN_STREAM,
)
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.rows.unchanged_batch import UnchangedBatch
from penstock.streaming.stream import Stream
from penstock.streaming.token_log import TokenLog
from penstock.wire.frames import FinishReason, TokenFrame
from tests.streaming.test_output_processor import Column, RecordingReply

NO_LIMIT = (1 << 31) - 1


def frame(
    streams: Sequence[int], positions: Sequence[int], token: int = 0, finish: Sequence[int] | None = None
) -> TokenFrame:
    return TokenFrame(
        step=1,
        stream=np.array(streams, np.int32),
        position=np.array(positions, np.int32),
        tokens=np.full(len(streams), token, np.int32),
        finish=None if finish is None else np.array(finish, np.int8),
    )


class Bench:
    """A processor whose streams have had ``steps`` frames of one token each, a second apart."""

    def __init__(self, streams: int = 3, steps: int = 3, limit: int = NO_LIMIT) -> None:
        self.ttft, self.itl = Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS)
        self.sizes = Histogram(EVENT_BOUNDS)
        self.table = OutputProcessor(
            [b"a", b"b"], RowMetrics(self.ttft, self.itl, self.sizes), TokenLog(), capacity=2
        )
        self.replies = [RecordingReply() for _ in range(streams)]
        self.streams = []
        for reply in self.replies:
            head = b"<" if len(self.streams) else b""  # the first one is no event stream
            stream = Stream(reply, 0, 0, lambda data: None, head, b">")
            self.table.open(stream, 0.0, limit, written=bool(stream.head))
            self.streams.append(stream)
        self.handles = [stream.handle for stream in self.streams]
        self.steps = 0
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.steps += 1
        self.arrive(frame(self.handles, [self.steps - 1] * len(self.handles)))

    def arrive(self, arriving: TokenFrame) -> None:
        self.table.process_frame(0, arriving, float(self.steps))

    def faults(self) -> dict[str, int]:
        return {reason: count for (_, reason), count in self.table.faults.counts.items()}

    def delivered(self) -> list[int]:
        return [self.table.num_delivered(stream) for stream in self.streams]


def test_steady_frames_are_counted_as_others_are() -> None:
    bench = Bench(streams=3, steps=5)
    assert bench.table._unchanged[0].frames == 4
    assert bench.delivered() == [5, 5, 5]
    assert [len(tokens) for tokens in bench.table.delivered_tokens(bench.streams)] == [5, 5, 5]
    assert (bench.ttft.counts.sum(), bench.ttft.total) == (3, 3.0)
    assert (bench.itl.counts.sum(), bench.itl.total) == (12, 12.0)
    assert (bench.sizes.counts.sum(), bench.sizes.total) == (10, 10.0)
    assert bench.table.streams_idle_since(4.5) == []
    assert len(bench.table.streams_idle_since(5.0)) == 2
    bench.step()
    assert bench.delivered() == [6, 6, 6]


@pytest.mark.parametrize(
    ("arriving", "fault", "left"),
    [
        (lambda h: frame(h, [3, 4, 3]), OUT_OF_ORDER, [4, 3, 4]),
        (lambda h: frame(h, [2, 2, 2]), OUT_OF_ORDER, [3, 3, 3]),
        (lambda h: frame(h, [3, 3, 3], token=9), INVALID_TOKEN, [3, 3, 3]),
        (lambda h: frame([*h[:2], 99], [3, 3, 3]), UNKNOWN_STREAM, [4, 4, 3]),
        (lambda h: frame([h[0], h[0], h[1]], [3, 3, 3]), OUT_OF_ORDER, [3, 4, 3]),
    ],
)
def test_what_does_not_continue_is_refused(arriving: object, fault: str, left: list[int]) -> None:
    bench = Bench(streams=3, steps=3)
    bench.arrive(arriving(bench.handles))  # type: ignore[operator]
    assert list(bench.faults()) == [fault]
    assert bench.delivered() == left


def test_no_stream_gets_more_than_its_limit() -> None:
    bench = Bench(streams=2, steps=3, limit=3)
    assert bench.faults() == {}
    bench.step()
    assert bench.faults() == {TOO_MANY_TOKENS: 2}
    assert bench.delivered() == [3, 3]


def test_a_stream_that_was_closed_or_moved_gets_no_row() -> None:
    bench = Bench(streams=3, steps=3)
    bench.table.detach(bench.streams[0])
    bench.table.assign(bench.streams[0], 1)
    bench.step()
    assert bench.faults() == {UNKNOWN_STREAM: 1}
    bench.table.close(bench.streams[1])
    bench.step()
    assert bench.faults() == {UNKNOWN_STREAM: 3}
    assert bench.table.num_delivered(bench.streams[0]) == 3
    assert bench.table.num_delivered(bench.streams[2]) == 5


def test_a_handle_that_is_used_again_starts_anew() -> None:
    bench = Bench(streams=2, steps=3)
    finish = [FinishReason.EOS, FinishReason.NONE]
    bench.arrive(frame(bench.handles, [3, 3], finish=finish))
    stream = Stream(RecordingReply(), 0, 0, lambda data: None, b"<", b">")
    assert bench.table.open(stream, 3.0) == bench.handles[0]
    bench.arrive(frame(bench.handles, [0, 4]))
    bench.arrive(frame(bench.handles, [1, 5]))
    assert bench.faults() == {}
    assert (bench.table.num_delivered(stream), bench.table.num_delivered(bench.streams[1])) == (2, 6)


numbers = st.integers(0, NO_LIMIT)
counts = st.one_of(st.none(), st.lists(st.integers(1, 9), min_size=4, max_size=4))


@given(st.lists(numbers, min_size=1, max_size=4), counts, counts, st.data())
def test_rows_continue_if_each_position_is_the_next_one(
    first: list[int], counted: list[int] | None, next_counted: list[int] | None, data: st.DataObject
) -> None:
    added = (counted or [1] * 4)[: len(first)]
    errors = [data.draw(st.sampled_from([0, 0, 0, -1, 1, 256])) for _ in first]
    wanted = [position + count for position, count in zip(first, added, strict=True)]
    following = [min(max(next + error, 0), NO_LIMIT) for next, error in zip(wanted, errors, strict=True)]
    rows = UnchangedBatch(several(first, counted), 0.0, None, left=9)
    assert rows.continue_with(several(following, next_counted)) == (following == wanted)


def several(positions: Sequence[int], counted: Sequence[int] | None) -> TokenFrame:
    """Rows of the streams 0, 1, … with so many tokens each."""
    made = frame(range(len(positions)), positions)
    if counted is not None:
        made.count = np.array(counted[: len(positions)], np.int32)
        made.tokens = np.zeros(int(made.count.sum()), np.int32)
    return made


def test_a_row_without_tokens_does_not_continue() -> None:
    rows = UnchangedBatch(several([0, 0], [2, 2]), 0.0, None, left=9)
    assert not rows.continue_with(several([2, 2], [0, 2]))
    assert rows.continue_with(several([2, 2], [1, 2]))


def test_no_stream_gets_more_than_its_limit_by_rows_of_several_tokens() -> None:
    bench = Bench(streams=2, steps=1, limit=8)
    for position, counted in ((1, [3, 3]), (4, [3, 2])):
        bench.arrive(several_of(bench.handles, [position] * 2, counted))
    bench.arrive(several_of(bench.handles, [7, 6], [1, 2]))
    assert (bench.delivered(), bench.faults()) == ([8, 8], {})
    bench = Bench(streams=2, steps=1, limit=8)
    bench.arrive(several_of(bench.handles, [1, 1], [3, 3]))
    bench.arrive(several_of(bench.handles, [4, 4], [5, 4]))
    assert (bench.delivered(), bench.faults()) == ([4, 8], {TOO_MANY_TOKENS: 1})


def several_of(handles: Sequence[int], positions: Sequence[int], counted: Sequence[int]) -> TokenFrame:
    made = several(positions, counted)
    made.stream = np.array(handles, np.int32)
    return made


@given(st.integers(1, 5), st.data())
def test_rows_of_several_tokens_are_counted_as_those_of_other_frames_are(
    streams: int, data: st.DataObject
) -> None:
    """By two processors, one of which checks every frame row by row."""
    first, second = (Bench(streams, steps=1, limit=40) for _ in range(2))
    positions = [1] * streams
    for _ in range(12):
        first.steps = second.steps = first.steps + 1
        counted = data.draw(
            st.one_of(st.just([1] * streams), st.lists(st.integers(1, 8), min_size=streams, max_size=streams))
        )
        arriving = several_of(first.handles, positions, counted)
        if set(counted) == {1} and data.draw(st.booleans()):
            arriving.count = None
        first.arrive(arriving)
        second.table._end_unchanged(0)
        second.arrive(arriving)
        positions = [position + count for position, count in zip(positions, counted, strict=True)]
    assert first.faults() == second.faults()
    assert first.delivered() == second.delivered()
    for one, two in ((first.ttft, second.ttft), (first.itl, second.itl), (first.sizes, second.sizes)):
        assert (one.counts.tolist(), one.total) == (two.counts.tolist(), two.total)
    for one, two in zip(
        first.table.delivered_tokens(first.streams),
        second.table.delivered_tokens(second.streams),
        strict=True,
    ):
        assert one.tolist() == two.tolist()
    assert first.table.streams_idle_since(11.5) == [] or first.faults()


class Sockets:
    """Takes chunks as sockets do; a full one takes two bytes of each, the rest goes to its connection."""

    def __init__(self) -> None:
        self.taken: dict[int, bytes] = {}
        self.full: set[int] = set()
        self.bursts = 0

    def burst(self, descriptors: Column, data: bytes, sizes: Column) -> list[tuple[int, int]]:
        self.bursts += 1
        short, start = [], 0
        for index, (descriptor, size) in enumerate(zip(descriptors.tolist(), sizes.tolist(), strict=True)):
            sent = 2 if descriptor in self.full else size
            self.take(descriptor, data[start : start + sent])
            if sent < size:
                short.append((index, sent))
            start += size
        assert start == len(data)
        return short

    def take(self, descriptor: int, data: bytes) -> None:
        self.taken[descriptor] = self.taken.get(descriptor, b"") + data


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


@pytest.mark.parametrize("width", [1, 3, 40])
def test_unchanged_batches_are_written_as_others_are(width: int) -> None:
    """``width``: tokens in each row of the first stream."""
    sockets, replies = Sockets(), [RecordingReply() for _ in range(3)]
    metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
    large = b"l" * 70_000
    texts = [b"a", b"bc", None, large]
    table = OutputProcessor(texts, metrics, TokenLog(), sockets.burst, capacity=4)
    streams = []
    for descriptor, reply in enumerate(replies):

        def write(data: bytes, descriptor: int = descriptor) -> None:
            sockets.take(descriptor, chunk(data))

        def write_rest(data: bytes, descriptor: int = descriptor) -> None:
            sockets.take(descriptor, data)

        stream = Stream(reply, 0, 0, write, b"<", b">")
        table.open(stream, 0.0)
        stream.write_plain_rows(WriteTarget(descriptor=descriptor, write_rest=write_rest))
        streams.append(stream)
    handles = [stream.handle for stream in streams]
    most = min(width, 3)
    tokens = [0, 0, 1, 3, 2, 1, 0, 0, 1]
    for step, token in enumerate(tokens):
        sockets.full = {1} if step == 6 else set()
        arriving = several_of(handles, [step * width, step * most, step * most], [width, most, most])
        arriving.tokens[:] = token
        if width == 1:
            arriving.count = None
        table.process_frame(0, arriving, 0.0)
        assert (table._unchanged[0].frames > 0) == (step > 0)
    shown = [text for token in tokens if (text := texts[token]) is not None]
    for number, count in enumerate((width, most, most)):
        assert sockets.taken[number] == b"".join(chunk(b"<%s>" % (count * text)) for text in shown)
        assert replies[number].rows == [([2] * count, FinishReason.NONE, 0)]
    assert sockets.bursts == len(tokens) - 2  # the large events and those of the replies were not
