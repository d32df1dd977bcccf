"""The stream table: rows reach their streams, in order, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.http.write_target import WriteTarget
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.rows.io_submit import BurstWriter, write_each
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_log import TokenLog
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import SamplingParams, Submit

TEXTS: list[bytes | None] = [b"a", b"bc", None, b"d"]
CAREFUL = 2
I32_MAX = (1 << 31) - 1


class RecordingReply:
    arrays = False

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], FinishReason, int]] = []
        self.errors: list[str] = []
        self.prompts: list[list[int]] = []

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        self.rows.append((list(tokens), finish, cached))

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        self.prompts.append(logprobs.position.tolist())

    def on_resumed(self, rank: int, position: int) -> None:
        pass

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        self.errors.append(error.code)


class BrokenReply(RecordingReply):
    def on_row(self, *arguments: object) -> None:
        raise RuntimeError("a fault in one stream's handling")


Column = NDArray[np.int64]


def make_table(burst: BurstWriter = write_each) -> OutputProcessor:
    metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
    return OutputProcessor(TEXTS, metrics, TokenLog(), burst, capacity=2)


def open_plain(
    table: OutputProcessor, stream: Stream, write_target: WriteTarget | None = None, **options: int
) -> int:
    """Open a stream whose plain rows are written without its reply."""
    handle = table.open(stream, 0.0, **options)
    stream.write_plain_rows(write_target)
    return handle


def make_stream(reply: RecordingReply, written: list[bytes], rank: int = 0) -> Stream:
    stream = Stream(reply, 0, rank, written.append, b"<", b">")
    return stream


def frame(*rows: tuple[int, int, list[int]], finish: Sequence[FinishReason] | None = None) -> TokenFrame:
    counts = [len(tokens) for _, _, tokens in rows]
    return TokenFrame(
        step=1,
        stream=np.array([handle for handle, _, _ in rows], np.int32),
        position=np.array([position for _, position, _ in rows], np.int32),
        tokens=np.array([token for _, _, tokens in rows for token in tokens], np.int32),
        count=None if all(count == 1 for count in counts) else np.array(counts, np.int32),
        finish=None if finish is None else np.array(finish, np.int8),
    )


def test_a_plain_row_is_one_chunk() -> None:
    table, written = make_table(), list[bytes]()
    handle = open_plain(table, make_stream(RecordingReply(), written))
    table.process_frame(0, frame((handle, 0, [0])), 1.0)
    table.process_frame(0, frame((handle, 1, [1, 3])), 2.0)
    assert written == [b"<a>", b"<bcd>"]


def test_streams_with_a_descriptor_are_written_together_past_their_connections() -> None:
    """And no longer once a socket has not taken all: what follows must not overtake the rest."""
    bursts: list[tuple[list[int], bytes, list[int]]] = []

    def burst(descriptors: Column, data: bytes, sizes: Column) -> list[tuple[int, int]]:
        bursts.append((descriptors.tolist(), data, sizes.tolist()))
        return [(index, 4) for index, descriptor in enumerate(descriptors) if descriptor == 6]

    table, connections = make_table(burst), [list[bytes]() for _ in range(3)]
    streams = [make_stream(RecordingReply(), written) for written in connections]
    for stream, descriptor in zip(streams, (5, 6, -1), strict=True):
        path = WriteTarget(descriptor=descriptor, write_rest=stream.write) if descriptor > 0 else None
        open_plain(table, stream, path)
    for position, tokens in enumerate(([0], [1], [3, 3])):
        table.process_frame(0, frame(*((stream.handle, position, tokens) for stream in streams)), 1.0)
    one, two, three = b"3\r\n<a>\r\n", b"4\r\n<bc>\r\n", b"4\r\n<dd>\r\n"
    assert bursts == [([5, 6], one + one, [8, 8]), ([5], two, [9]), ([5], three, [9])]
    assert connections == [[], [one[4:], b"<bc>", b"<dd>"], [b"<a>", b"<bc>", b"<dd>"]]


def test_a_row_too_large_for_a_prepared_chunk_size_goes_to_the_connection() -> None:
    table, written, bursts = make_table(), list[bytes](), list[bytes]()
    table = make_table(lambda descriptors, data, sizes: bursts.append(data) or [])
    handle = open_plain(table, make_stream(RecordingReply(), written), WriteTarget(descriptor=7))
    few, many = [1] * 8190, [1] * 8191
    table.process_frame(0, frame((handle, 0, few)), 1.0)
    table.process_frame(0, frame((handle, len(few), many)), 2.0)
    assert bursts == [b"3ffe\r\n<" + b"bc" * 8190 + b">\r\n"]
    assert written == [b"<" + b"bc" * 8191 + b">"]


def test_rows_that_need_care_go_to_the_reply() -> None:
    table, written, reply = make_table(), list[bytes](), RecordingReply()
    handle = open_plain(table, make_stream(reply, written))
    table.process_frame(0, frame((handle, 0, [CAREFUL])), 1.0)
    table.process_frame(0, frame((handle, 1, [0, CAREFUL, 0])), 2.0)
    table.process_frame(0, frame((handle, 4, [0]), finish=[FinishReason.LENGTH]), 3.0)
    assert written == []
    assert reply.rows == [
        ([CAREFUL], FinishReason.NONE, 0),
        ([0, CAREFUL, 0], FinishReason.NONE, 0),
        ([0], FinishReason.LENGTH, 0),
    ]
    assert len(table) == 0


@pytest.mark.parametrize("position", [0, 2])
def test_lost_or_repeated_tokens_end_the_stream(position: int) -> None:
    table, written, reply = make_table(), list[bytes](), RecordingReply()
    handle = open_plain(table, make_stream(reply, written))
    table.process_frame(0, frame((handle, 0, [0])), 1.0)
    table.process_frame(0, frame((handle, position, [1])), 2.0)
    assert len(written) == 1
    assert reply.errors == ["engine_error"]
    assert table.faults.counts == {(0, "out_of_order"): 1}


def test_rows_of_another_engine_or_of_no_stream_are_dropped() -> None:
    table, reply, written = make_table(), RecordingReply(), list[bytes]()
    handle = open_plain(table, make_stream(reply, written))
    table.process_frame(1, frame((handle, 0, [0])), 1.0)
    table.process_frame(0, frame((handle + 1, 0, [0])), 1.0)
    table.process_frame(0, frame((9999, 0, [0]), (handle, 0, [1]), (I32_MAX, 0, [1])), 1.0)
    assert table.running_stream(0, 9999) is None
    assert (reply.errors, written) == ([], [b"<bc>"])
    assert table.faults.counts == {(1, "unknown_stream"): 1, (0, "unknown_stream"): 4}


def test_a_row_that_cannot_be_right_ends_its_stream_alone() -> None:
    """At its engine too; the handle is free once that has confirmed, in order or not."""
    for row, reason in (
        ((0, [len(TEXTS)]), "invalid_token"),
        ((0, [0, I32_MAX]), "invalid_token"),
        ((0, [0, 1, 3]), "too_many_tokens"),
        ((I32_MAX, [1]), "out_of_order"),
        ((I32_MAX, []), "out_of_order"),
    ):
        table, replies, written = make_table(), [RecordingReply() for _ in range(2)], list[bytes]()
        aborted: list[Stream] = []
        table.set_engines(aborted.append, table.faults)
        streams = [make_stream(reply, written) for reply in replies]
        wrong, sound = (open_plain(table, stream, max_tokens=2) for stream in streams)
        position, tokens = row
        for _ in range(2):  # until the engine knows
            table.process_frame(0, frame((wrong, position, tokens)), 1.0)
        table.process_frame(0, frame((wrong, position, tokens), (sound, 0, [0])), 1.0)
        assert [reply.errors for reply in replies] == [["engine_error"], []]
        assert written == [b"<a>"]
        assert table.faults.counts == {(0, reason): 1}
        assert aborted == [streams[0]]
        table.process_frame(0, frame((wrong, 77, []), finish=[FinishReason.ABORT]), 1.0)
        assert len(table) == 1


def test_a_stream_twice_in_a_frame_is_joined_or_ends() -> None:
    table, replies = make_table(), [RecordingReply() for _ in range(4)]
    chunks = [list[bytes]() for _ in replies]
    handles = [open_plain(table, make_stream(*each)) for each in zip(replies, chunks, strict=True)]
    joined, repeated, apart, sound = handles
    first = frame((joined, 0, [0]), (repeated, 0, [0]), (apart, 0, [0]), (sound, 0, [1]))
    second = frame((joined, 1, [3]), (repeated, 0, [0]), (apart, 2, [3]))
    rows = [
        (int(h), int(p), [int(t)])
        for f in (first, second)
        for h, p, t in zip(f.stream, f.position, f.tokens, strict=True)
    ]
    table.process_frame(0, frame(*rows), 1.0)
    assert chunks == [[b"<ad>"], [], [], [b"<bc>"]]
    assert [reply.errors for reply in replies] == [[], ["engine_error"], ["engine_error"], []]


def test_rows_after_the_end_of_their_stream_spare_the_others() -> None:
    table, replies = make_table(), [RecordingReply() for _ in range(2)]
    ended, sound = (open_plain(table, make_stream(reply, [])) for reply in replies)
    end = frame((ended, 0, [0]), (sound, 0, [CAREFUL]), (ended, 1, []), finish=[2, 0, 2])
    table.process_frame(0, end, 1.0)
    assert replies[0].errors == ["engine_error"]
    assert len(table) == 1
    table.process_frame(0, frame((ended, 1, [0]), (sound, 1, [CAREFUL])), 1.0)
    assert [row[0] for row in replies[1].rows] == [[CAREFUL], [CAREFUL]]
    assert table.faults.counts == {(0, "out_of_order"): 1, (0, "unknown_stream"): 1}


def test_a_handle_is_reused_only_after_its_end() -> None:
    table, reply = make_table(), RecordingReply()
    stream = make_stream(reply, [])
    handle = table.open(stream, 0.0)
    table.discard(stream)
    others = [open_plain(table, make_stream(RecordingReply(), [])) for _ in range(5)]
    assert handle not in others
    table.process_frame(0, frame((handle, 0, [1]), finish=[FinishReason.ABORT]), 1.0)
    assert reply.rows == []
    assert open_plain(table, make_stream(RecordingReply(), [])) == handle


def test_tokens_that_nobody_wants_are_told_apart() -> None:
    table = make_table()
    wanted = open_plain(table, make_stream(RecordingReply(), []))
    left = make_stream(RecordingReply(), [])
    table.open(left, 0.0)
    table.process_frame(0, frame((wanted, 0, [0]), (left.handle, 0, [1])), 1.0)
    table.discard(left)
    table.process_frame(0, frame((wanted, 1, [0, 3]), (left.handle, 1, [0, 1, 3])), 2.0)
    assert (table.generated_tokens, table.discarded_tokens) == (7, 3)


def test_adapters_run_or_wait() -> None:
    table = make_table()
    for adapter in ("sql", "chat", "sql", None):
        stream = make_stream(RecordingReply(), [])
        table.open(stream, 0.0)
        stream.request = Submit(stream.handle, b"", SamplingParams(1, 0), 1, adapter=adapter)
    assert table.adapter_counts() == {("sql", "waiting"): 2, ("chat", "waiting"): 1}
    table.process_frame(0, frame((0, 0, [1]), (1, 0, [1]), (3, 0, [1])), 1.0)
    assert table.adapter_counts() == {("sql", "running"): 1, ("chat", "running"): 1, ("sql", "waiting"): 1}


def test_a_fault_in_one_stream_spares_the_others() -> None:
    table, written = make_table(), list[bytes]()
    broken = BrokenReply()
    first = open_plain(table, make_stream(broken, []))
    second = open_plain(table, make_stream(RecordingReply(), written))
    table.process_frame(0, frame((first, 0, [CAREFUL]), (second, 0, [0])), 1.0)
    assert broken.errors == ["internal_error"]
    assert written == [b"<a>"]


def test_no_row_of_a_broken_stream_reaches_its_connection() -> None:
    """Whatever its reply does: by then the connection, or its descriptor, may be another client's."""
    bursts: list[bytes] = []

    def burst(descriptors: Column, data: bytes, sizes: Column) -> list[tuple[int, int]]:
        bursts.append(data)
        return []

    table, written, aborted = make_table(burst), list[bytes](), list[Stream]()
    table.set_engines(aborted.append, table.faults)
    stream = make_stream(BrokenReply(), written)
    handle = table.open(stream, 0.0)
    table.process_frame(0, frame((handle, 0, [CAREFUL])), 1.0)
    stream.write_plain_rows(WriteTarget(descriptor=7))
    table.process_frame(0, frame((handle, 1, [0])), 1.0)
    stream.write(b"late")
    table.process_frame(0, frame((handle, 2, [0, 1])), 1.0)
    assert (written, [each for each in bursts if each]) == ([], [])
    assert aborted == [stream], "its engine would go on to its end"
    assert table.discarded_tokens == 3
    table.process_frame(0, frame((handle, 5, []), finish=[FinishReason.ABORT]), 1.0)
    assert len(table) == 0


def test_a_connection_that_raises_ends_its_own_stream() -> None:
    def refuse(data: bytes) -> None:
        raise RuntimeError("closed")

    for finish in (None, [0, 0]):
        table, written, reply = make_table(), list[bytes](), RecordingReply()
        broken = Stream(reply, 0, 0, refuse, b"<", b">")
        handles = [open_plain(table, stream) for stream in (broken, make_stream(RecordingReply(), written))]
        table.process_frame(0, frame(*((handle, 0, [0]) for handle in handles), finish=finish), 1.0)
        assert reply.errors == ["internal_error"]
        assert written == [b"<a>"]


def test_a_burst_that_raises_ends_the_streams_of_its_frame() -> None:
    def burst(descriptors: Column, data: bytes, sizes: Column) -> list[tuple[int, int]]:
        raise OSError("io_getevents(2)")

    table, reply = make_table(burst), RecordingReply()
    handle = open_plain(table, make_stream(reply, []), WriteTarget(descriptor=7))
    table.process_frame(0, frame((handle, 0, [0])), 1.0)
    assert reply.errors == ["internal_error"]


def test_streams_of_a_dead_engine_go_on_where_they_were() -> None:
    table, written, reply = make_table(), list[bytes](), RecordingReply()
    stream = make_stream(reply, written)
    handle = open_plain(table, stream)
    other = make_stream(RecordingReply(), [], rank=1)
    table.open(other, 0.0)
    gone = make_stream(RecordingReply(), [])
    table.open(gone, 0.0)
    table.discard(gone)
    table.process_frame(0, frame((handle, 0, [0, 3])), 1.0)
    assert table.detach_engine(0) == [stream]
    assert table.is_unassigned(stream)
    assert not table.is_unassigned(other)
    assert len(table) == 2  # nobody waits for the end of the discarded one
    assert [tokens.tolist() for tokens in table.delivered_tokens([stream])] == [[0, 3]]
    table.process_frame(0, frame((handle, 2, [1])), 2.0)
    table.assign(stream, 1)
    table.process_frame(0, frame((handle, 2, [1])), 2.0)
    assert table.faults.counts == {(0, "unknown_stream"): 2}
    table.process_frame(1, frame((handle, 2, [1])), 2.0)
    assert b"".join(written) == b"<ad><bc>"
    assert [tokens.tolist() for tokens in table.delivered_tokens([stream])] == [[0, 3, 1]]
    assert reply.errors == []


def test_only_the_cached_tokens_of_a_first_row_count() -> None:
    table, cached = make_table(), list[int]()

    class CachedReply(RecordingReply):
        def on_row(
            self,
            stream: Stream,
            tokens: Sequence[int],
            finish: FinishReason,
            cached_now: int,
            logprobs: Logprobs | None,
        ) -> None:
            cached.append(cached_now)

    handle = open_plain(table, make_stream(CachedReply(), []))
    for position in (0, 1):
        row = frame((handle, position, [CAREFUL]))
        row.cached = np.array([7], np.int32)
        table.process_frame(0, row, 1.0)
    assert cached == [7, 0]


def scored(row: list[int], place: list[int]) -> PromptLogprobs:
    count = len(row)
    return PromptLogprobs(
        np.array(row, np.int32),
        np.array(place, np.int32),
        np.zeros((count, 1), np.int32),
        np.zeros((count, 1), np.float32),
        np.ones(count, np.int32),
    )


def test_prompt_logprobs_come_before_tokens_and_are_no_row() -> None:
    table, written = make_table(), list[bytes]()
    first, second = RecordingReply(), RecordingReply()
    one = open_plain(table, make_stream(first, written))
    two = open_plain(table, make_stream(second, written))
    only_prompts = frame((two, 0, []))
    only_prompts.prompt = scored([0, 0], [1, 2])
    table.process_frame(0, only_prompts, 1.0)
    assert second.prompts == [[1, 2]]
    assert (second.rows, written) == ([], [])
    mixed = frame((one, 0, []), (two, 0, [0]), (one, 0, [CAREFUL]))
    mixed.prompt = scored([0, 1], [1, 3])
    table.process_frame(0, mixed, 2.0)
    assert (first.prompts, second.prompts) == ([[1]], [[1, 2], [3]])
    assert written == [b"<a>"]
    assert first.rows == [([CAREFUL], FinishReason.NONE, 0)]
    assert [table.num_delivered(stream) for stream in table.streams if stream is not None] == [1, 1]


def test_a_fault_with_prompt_logprobs_ends_that_stream_alone() -> None:
    class Broken(RecordingReply):
        def on_prompt(self, *arguments: object) -> None:
            raise ValueError("some were lost")

    table, written = make_table(), list[bytes]()
    broken, sound = Broken(), RecordingReply()
    handles = [open_plain(table, make_stream(reply, written)) for reply in (broken, sound)]
    row = frame(*((handle, 0, [0]) for handle in handles))
    row.prompt = scored([0, 1], [1, 1])
    table.process_frame(0, row, 1.0)
    assert broken.errors == ["internal_error"]
    assert sound.prompts == [[1]]


def test_latency_is_recorded_per_row() -> None:
    ttft, itl = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    table = OutputProcessor(TEXTS, RowMetrics(ttft, itl, Histogram(EVENT_BOUNDS)))
    handle = table.open(make_stream(RecordingReply(), []), 10.0)
    table.process_frame(0, frame((handle, 0, [0])), 11.5)
    table.process_frame(0, frame((handle, 1, [0])), 12.0)
    assert (ttft.counts.tolist(), ttft.total) == ([0, 1, 0], 1.5)
    assert (itl.counts.tolist(), itl.total) == ([1, 0, 0], 0.5)


def test_an_end_without_a_token_is_no_first_token_and_no_event() -> None:
    """As of a stream whose client gave up while it waited, or of a stop token that is left out."""
    ttft, itl, sizes = Histogram((1.0, 2.0)), Histogram((1.0, 2.0)), Histogram(EVENT_BOUNDS)
    table = OutputProcessor(TEXTS, RowMetrics(ttft, itl, sizes))
    waits, runs, goes_on = (table.open(make_stream(RecordingReply(), []), 10.0) for _ in range(3))
    table.process_frame(0, frame((runs, 0, [0]), (goes_on, 0, [0])), 11.5)
    ends = frame((waits, 0, []), (runs, 1, []), (goes_on, 1, [0]))
    ends.finish = np.array([FinishReason.ABORT, FinishReason.EOS, FinishReason.NONE], np.int8)
    table.process_frame(0, ends, 12.0)
    assert (ttft.counts.tolist(), ttft.total) == ([0, 2, 0], 3.0)
    assert (itl.counts.tolist(), itl.total) == ([1, 0, 0], 0.5)
    assert (int(sizes.counts.sum()), sizes.total) == (3, 3.0)


def test_tokens_per_event_are_recorded_for_streams_that_write_events() -> None:
    sizes = Histogram((1.0, 4.0))
    table = OutputProcessor(TEXTS, RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), sizes))
    streamed = open_plain(table, make_stream(RecordingReply(), []))
    collected = table.open(Stream(RecordingReply(), 0, 0, [].append), 0.0, written=False)
    table.process_frame(0, frame((streamed, 0, [0]), (collected, 0, [0])), 1.0)
    table.process_frame(0, frame((streamed, 1, [0, 1, 3]), (collected, 1, [0, 1, 3])), 2.0)
    assert (sizes.counts.tolist(), sizes.total) == ([1, 1, 0], 4.0)


def test_rows_with_very_many_logprobs_take_turns_and_hold_up_nobody() -> None:
    """Making their events takes milliseconds each: a whole frame of them is not handled at once."""
    turns: list[Callable[[], None]] = []
    metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
    table = OutputProcessor([b"a"] * 8192, metrics, TokenLog(), later=turns.append)
    replies = [RecordingReply() for _ in range(3)]
    streams = [make_stream(reply, []) for reply in replies]
    written = list[bytes]()
    for stream in streams:
        table.open(stream, 0.0)
    open_plain(table, make_stream(RecordingReply(), written))
    rows = frame(*((stream.handle, 0, [1, 2]) for stream in streams), (3, 0, [0]))
    entries, token = 64, np.repeat(np.arange(6, dtype=np.int32), 64)  # 64 entries of 128 candidates
    ids = np.tile(np.arange(64 * 128, dtype=np.int32).reshape(entries, 128), (6, 1))
    rows.logprobs = Logprobs(token, ids, np.zeros(ids.shape, np.float32), token)
    rows.finish = np.array([0, FinishReason.LENGTH, 0, 0], np.int8)
    table.process_frame(0, rows, 1.0)
    assert written == [b"<a>"]  # the other stream's
    assert [reply.rows for reply in replies] == [[], [], []]
    assert [table.num_delivered(stream) for stream in streams] == [0, 0, 0]
    seen = []
    while turns:
        turns.pop()()
        seen.append(tuple(len(reply.rows) for reply in replies))
    assert seen == [(1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)]
    assert replies[1].rows == [([1], FinishReason.NONE, 0), ([2], FinishReason.LENGTH, 0)]
    assert table.streams[streams[1].handle] is None


def test_a_stream_that_fails_gets_its_waiting_rows_first() -> None:
    turns: list[Callable[[], None]] = []
    metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
    table = OutputProcessor([b"a"] * 512, metrics, TokenLog(), later=turns.append)
    reply = RecordingReply()
    stream = make_stream(reply, [])
    handle = table.open(stream, 0.0)
    rows, token = frame((handle, 0, [1, 2])), np.repeat(np.arange(2, dtype=np.int32), 2)
    ids = np.tile(np.arange(256, dtype=np.int32).reshape(2, 128), (2, 1))
    rows.logprobs = Logprobs(token, ids, np.zeros(ids.shape, np.float32), token)
    table.process_frame(0, rows, 1.0)
    assert reply.rows == []
    table.fail(0, handle, StreamError(500, "engine_error", "lost"))
    assert (reply.rows, reply.errors) == (
        [([1], FinishReason.NONE, 0), ([2], FinishReason.NONE, 0)],
        ["engine_error"],
    )
    turns.pop()()  # nothing is left of it
    assert len(reply.rows) == 2


def test_a_reply_that_breaks_drops_the_rows_that_wait_for_it() -> None:
    turns: list[Callable[[], None]] = []
    metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
    table = OutputProcessor([b"a"] * 512, metrics, TokenLog(), later=turns.append)
    reply, tokens = BrokenReply(), 2000
    stream = make_stream(reply, [])
    handle = table.open(stream, 0.0)
    rows = frame((handle, 0, [1] * tokens), finish=[FinishReason.LENGTH])
    token = np.repeat(np.arange(tokens, dtype=np.int32), 2)
    ids = np.tile(np.arange(256, dtype=np.int32).reshape(2, 128), (tokens, 1))
    rows.logprobs = Logprobs(token, ids, np.zeros(ids.shape, np.float32), token)
    table.process_frame(0, rows, 1.0)
    turns.pop()()
    assert reply.errors == ["internal_error"]
    assert (len(table), turns) == (0, [])


def test_a_stream_that_asks_for_it_knows_which_weights_made_its_tokens() -> None:
    table = make_table()
    streams = [make_stream(RecordingReply(), []) for _ in range(3)]
    streams[0].versions, streams[1].versions = [], []
    first, second, third = (open_plain(table, stream) for stream in streams)
    assert streams[0].versions == [], "its engine has sent nothing"
    table.switch_weights(0, "a")
    for position in range(3):  # the same streams again, whose positions are not written down
        table.process_frame(0, frame((first, position, [0]), (second, position, [0])), 1.0)
    table.process_frame(0, frame((third, 0, [0])), 1.0)
    table.switch_weights(0, "b")
    table.process_frame(0, frame((first, 3, [0, 0])), 1.0)
    later = make_stream(RecordingReply(), [])
    later.versions = []
    table.open(later, 0.0)
    assert streams[0].versions == streams[1].versions == [(0, "a"), (3, "b")]
    assert (later.versions, streams[2].versions) == ([(0, "b")], None)


def test_a_stream_that_is_resumed_has_the_weights_of_the_other_engine_from_there_on() -> None:
    table = make_table()
    stream = make_stream(RecordingReply(), [])
    stream.versions = []
    handle = open_plain(table, stream)
    table.switch_weights(0, "a")
    table.switch_weights(1, "b")
    table.process_frame(0, frame((handle, 0, [0, 1])), 1.0)
    table.detach_engine(0)
    table.assign(stream, 1)
    table.process_frame(1, frame((handle, 2, [0])), 1.0)
    table.detach_engine(1)
    table.assign(stream, 0)  # a new process, whose weights are not known before its first frame
    table.switch_weights(0, "c")
    assert stream.versions == [(0, "a"), (2, "b"), (3, "c")]
