"""Delivers the rows of token frames to their streams: tokens to text to events, one loop per frame."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.http.http2.flow_windows import FlowWindows
from penstock.logging_setup import RateLimitedLog
from penstock.streaming.discarding_reply import DiscardingReply
from penstock.streaming.engine_faults import (
    INVALID_LOGPROBS,
    INVALID_ROUTES,
    INVALID_TOKEN,
    INVALID_TRANSFER,
    INVALID_VECTORS,
    OUT_OF_ORDER,
    TOO_MANY_TOKENS,
    UNKNOWN_STREAM,
    EngineFaults,
    InvalidOutputError,
)
from penstock.streaming.request_states import StreamEvent, StreamState, next_stream_state
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.rows.io_submit import BurstWriter, write_each
from penstock.streaming.rows.row_writer import RowWriter
from penstock.streaming.rows.unchanged_batch import UnchangedBatch, is_plain
from penstock.streaming.rows.wide_rows import WideRows
from penstock.streaming.stream import Stream, StreamError, StreamReply
from penstock.streaming.stream_columns import NO_ENGINE, NO_LIMIT, StreamColumns
from penstock.streaming.token_log import TokenLog
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, RoutedExperts
from penstock.wire.regroup import join_rows, take_rows
from penstock.wire.vectors import Vectors

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)

FAULT = StreamError(500, "internal_error", "The server failed to handle this stream.")
"""The end of a stream whose reply raised an exception."""
_REFUSALS = {
    OUT_OF_ORDER: "The engine's tokens arrived out of order.",
    INVALID_TOKEN: "The engine sent a token that the model does not have.",
    TOO_MANY_TOKENS: "The engine sent more tokens than the request allows.",
    INVALID_LOGPROBS: "The engine sent logprobs that are not valid.",
    INVALID_TRANSFER: "The engine sent kv_transfer_params that are not valid.",
    INVALID_ROUTES: "The engine sent routed experts that are not valid.",
    INVALID_VECTORS: "The engine sent vectors that are not valid.",
}
"""What clients are told, by the reason why a row was refused."""


def _at_once(function: Callable[[], None]) -> None:
    """The ``later`` of a processor without a loop."""
    function()


class OutputProcessor:
    """The streams of one API server. Handles are indexes into ``streams`` and into arrays that double.

    A handle is reused only after its engine has ended the stream (a finish row, a failure, the engine's
    death): rows in flight for an aborted stream can never reach another one.
    """

    def __init__(
        self,
        texts: Sequence[bytes | None],
        metrics: RowMetrics,
        log: TokenLog | None = None,
        burst: BurstWriter = write_each,
        windows: FlowWindows | None = None,
        later: Callable[[Callable[[], None]], object] = _at_once,
        guarded: Sequence[bool] | None = None,
        capacity: int = 1024,
    ) -> None:
        """``texts``: per token id of the model, the token's text if it is context-free, else None.
        ``guarded``: per token id, whether replies with a parser must see it; None: no token.

        ``metrics`` observe all rows. ``log`` keeps delivered tokens; without it streams cannot be resumed on
        another engine. ``burst`` writes to the sockets of HTTP/1.1 connections; ``windows`` are those of
        HTTP/2 connections. ``later`` calls a function after other events of the loop: rows with very many
        logprobs take turns.
        """
        self.streams: list[Stream | None] = [None] * capacity
        self.generated_tokens = 0
        """Tokens received."""
        self.faults = EngineFaults()
        self._abort: Callable[[Stream], None] = _no_abort
        self._free = list(range(capacity - 1, -1, -1))
        self._columns = StreamColumns(capacity, len(texts))
        self._unchanged: dict[int, UnchangedBatch] = {}
        """Rows of each engine's latest frames, as long as they are of the same streams. Their positions
        and times are written down (:meth:`_settle`) when they are needed."""
        self._versions: dict[int, str] = {}
        """Of the weights that the latest frame of each engine's connection was computed with, by rank."""
        self._texts = np.array(texts, np.object_)
        self._metrics = metrics
        self._log = log
        self._writer = RowWriter(
            self.streams,
            self._texts,
            burst,
            windows or FlowWindows(),
            self._handle_row,
            self.break_off,
            None if guarded is None else np.array(guarded, np.bool_),
        )
        self._discard = DiscardingReply()
        self._wide = WideRows(self._handle_row_now, later)

    def set_engines(self, abort: Callable[[Stream], None], faults: EngineFaults) -> None:
        """``abort`` aborts a dropped stream at its engine; ``faults`` counts what engines do wrong."""
        self._abort, self.faults = abort, faults

    def __len__(self) -> int:
        """Open streams, including aborted ones that their engine has not confirmed yet."""
        return len(self.streams) - len(self._free)

    # -- streams come and go

    def open(
        self, stream: Stream, arrival: float, max_tokens: int = NO_LIMIT, *, written: bool = True
    ) -> int:
        """Give a new stream a handle. ``arrival``: monotonic seconds when its request arrived;
        ``max_tokens``: tokens that its engine is asked for at most; ``written``: whether its rows become
        events, as in a streamed reply."""
        stream.state = next_stream_state(stream.state, StreamEvent.OPEN)
        if not self._free:
            self._grow()
        handle = self._free.pop()
        self.streams[handle] = stream
        stream.handle = handle
        stream.write_targets = self._writer
        self._columns.open(handle, stream.rank, arrival, max_tokens, written=written)
        self._note_version(stream)
        if self._log is not None:
            self._log.open(handle)
        return handle

    def num_delivered(self, stream: Stream) -> int:
        """Tokens of the stream that have been delivered to its reply."""
        self._settle(stream.rank)
        return int(self._columns.position[stream.handle]) - self._wide.tokens(stream.handle)

    @property
    def discarded_tokens(self) -> int:
        """The part of ``generated_tokens`` that no request wanted any more."""
        return self._discard.tokens

    def discard_tokens(self, count: int) -> None:
        """Count tokens that a reply received and did not output."""
        self._discard.tokens += count

    def discard(self, stream: Stream) -> None:
        """Drop a stream that its request no longer wants; the handle is free once the engine has ended it."""
        stream.state = next_stream_state(stream.state, StreamEvent.DROP)
        stream.detach(self._discard)

    def close(self, stream: Stream) -> None:
        """End a stream and free its handle; a stream that has ended stays as it is."""
        ended = stream.state is StreamState.ENDED
        stream.state = next_stream_state(stream.state, StreamEvent.END)
        if ended:
            return
        self._end_unchanged(stream.rank)
        handle = stream.handle
        self._wide.drop(handle)
        self.streams[handle] = None
        self._writer.close(handle)
        stream.write_targets = stream.write_target = None
        self._columns.close(handle)
        self._free.append(handle)
        if self._log is not None:
            self._log.close(handle)

    def streams_idle_since(self, since: float) -> list[Stream]:
        """Open streams that write events and have had no row since the monotonic time ``since``."""
        self._settle_all()
        quiet = np.flatnonzero(self._columns.written & (self._columns.last <= since))
        streams = (self.streams[handle] for handle in quiet.tolist())
        return [stream for stream in streams if stream is not None]

    def adapter_counts(self) -> Counter[tuple[str, str]]:
        """Number of open streams per (adapter name, state); "running" after the first token, else
        "waiting"."""
        self._settle_all()
        found: Counter[tuple[str, str]] = Counter()
        for stream in self.streams:
            if stream is not None and stream.request is not None and stream.request.adapter is not None:
                state = "running" if self._columns.position[stream.handle] else "waiting"
                found[stream.request.adapter, state] += 1
        return found

    def _grow(self) -> None:
        old = len(self.streams)
        self.streams.extend([None] * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))
        self._columns.grow()
        self._writer.grow(2 * old)

    # -- rows arrive

    def process_frame(self, rank: int, frame: TokenFrame, now: float) -> None:
        """Deliver the rows of a frame of engine ``rank`` to their streams.

        Rows of streams that the engine does not run are dropped; other rows that do not fit end their stream.
        Both are counted in ``faults``. Raises nothing that concerns single streams.
        """
        if not len(frame.stream):
            return
        if frame.vectors is not None:
            self._process_vectors(rank, frame, frame.vectors, now)
            return
        texts, unchanged = self._texts_of(frame), self._unchanged.get(rank)
        if (
            texts is None
            or unchanged is None
            or not self._columns.has_sound_logprobs(frame)
            or not unchanged.continue_with(frame)
        ):
            self._end_unchanged(rank)
            unchanged = None
            if texts is None or not self._columns.fits(rank, frame):
                frame = self._sift(rank, frame)
                if not len(frame.stream):
                    return
                texts = self._texts.take(frame.tokens)
        try:
            self._deliver(rank, frame, texts, now, unchanged)
        except Exception:  # noqa: BLE001 - the streams of the frame end, the others go on
            self._break_all(frame)

    def switch_weights(self, rank: int, version: str) -> None:
        """The next frame of engine ``rank`` was computed with these weights, or is the first one of its
        connection."""
        self._settle(rank)
        self._versions[rank] = version
        for handle in np.flatnonzero(self._columns.rank == rank).tolist():
            stream = self.streams[handle]
            assert stream is not None  # closed ones have no rank
            self._note_version(stream)

    def _note_version(self, stream: Stream) -> None:
        """The stream's next token comes from its engine's weights, if these are known."""
        if stream.versions is not None and (version := self._versions.get(stream.rank)) is not None:
            stream.versions.append((int(self._columns.position[stream.handle]), version))

    def _texts_of(self, frame: TokenFrame) -> NDArray[np.object_] | None:
        """The texts of all tokens; None if the model lacks one of them."""
        try:
            return self._texts.take(frame.tokens)
        except IndexError:  # cheaper than to look for the greatest
            return None

    def _settle(self, rank: int) -> None:
        """Write down how far the unchanged batch of an engine has come."""
        unchanged = self._unchanged.get(rank)
        if unchanged is not None and unchanged.frames:
            self._columns.advance(unchanged.latest)
            self._columns.last.put(unchanged.latest.stream, unchanged.now)
            unchanged.frames = 0

    def _settle_all(self) -> None:
        for rank in self._unchanged:
            self._settle(rank)

    def _end_unchanged(self, rank: int) -> None:
        """The next frame of an engine is checked row by row."""
        self._settle(rank)
        self._unchanged.pop(rank, None)

    def _sift(self, rank: int, frame: TokenFrame) -> TokenFrame:
        """The rows that fit. Drops rows of streams that the engine does not run, and ends the streams of
        other rows."""
        if frame.vectors is None:
            frame = join_rows([frame])
        handles, own = frame.stream, self._columns.is_run_by(rank, frame)
        stray = handles[~own]
        if len(stray):
            self.faults.record(
                rank, UNKNOWN_STREAM, "a row of stream %d, which it does not run", stray[0], count=len(stray)
            )
        sound = own.copy()
        for reason, rows in self._columns.refused(frame).items():
            for row in np.flatnonzero(sound & rows).tolist():
                ended = frame.finish is not None and bool(frame.finish[row])
                self._refuse(rank, int(handles[row]), reason, ended=ended)
            sound &= ~rows
        return take_rows(frame, np.flatnonzero(sound))

    def _refuse(self, rank: int, handle: int, reason: str, details: str = "", *, ended: bool = False) -> None:
        """The engine sent what does not fit its stream; ``ended``: with the stream's last row.
        ``details`` are for the log."""
        stream = self.streams[handle]
        assert stream is not None  # its rank was checked
        if stream.state is StreamState.RUNNING:
            message = _REFUSALS[reason]
            self.faults.record(rank, reason, "stream %d ends: %s", handle, details or message)
            self._fail(stream, stream.reply, StreamError(500, "engine_error", message), ended=ended)
        elif ended:
            self.close(stream)

    def _deliver(
        self,
        rank: int,
        frame: TokenFrame,
        texts: NDArray[np.object_],
        now: float,
        unchanged: UnchangedBatch | None,
    ) -> None:
        """Deliver rows that fit, one per stream. ``texts``: of their tokens. ``unchanged``: these rows, if
        they continue those of the frame before."""
        if frame.prompt is not None:
            frame = self._without_prompts(rank, frame, frame.prompt)  # those without tokens
            if not len(frame.stream):
                return
        handles = frame.stream
        if frame.kv_transfer_params is not None:
            self._hand_transfers(rank, frame.kv_transfer_params)
        if unchanged is None:
            columns = self._columns
            columns.advance(frame)
            self._metrics.record_latency(frame, now - columns.last.take(handles))
            columns.last.put(handles, now)
            written = columns.written.take(handles)
            self._metrics.record_sizes(frame, written)
            if is_plain(frame):
                left = int((columns.limit.take(handles) - columns.position.take(handles)).min())
                self._unchanged[rank] = UnchangedBatch(frame, now, None if written.all() else written, left)
        else:
            self._metrics.itl.add(now - unchanged.now, frame.rows)
            self._metrics.record_sizes(frame, unchanged.written)
            unchanged.now = now
        self.generated_tokens += len(frame.tokens)
        if self._log is not None:
            self._log.append(handles, frame.tokens, frame.count)
        self._writer.write(frame, texts, unchanged)

    def _process_vectors(self, rank: int, frame: TokenFrame, vectors: Vectors, now: float) -> None:
        """Deliver rows of inputs to their streams."""
        if not self._columns.fits(rank, frame):
            frame = self._sift(rank, frame)
            assert frame.vectors is not None  # rows were taken
            vectors = frame.vectors
        self._columns.advance(frame)
        self._columns.last.put(frame.stream, now)
        counts = frame.counts()
        of_values = np.cumsum(vectors.sizes(frame.tokens, counts)).tolist()
        of_inputs = np.cumsum(counts).tolist()
        finish = [0] * frame.rows if frame.finish is None else frame.finish.tolist()
        start = first = 0
        for row, (handle, end, last) in enumerate(
            zip(frame.stream.tolist(), of_values, of_inputs, strict=True)
        ):
            stream = self.streams[handle]
            if stream is not None:
                counted, values = frame.tokens[first:last], vectors.values[start:end]
                self._hand_vectors(rank, stream, frame, row, counted, values)
                if finish[row]:
                    self._handle_row_now(stream, (), FinishReason(finish[row]), 0, None)
            start, first = end, last

    def _hand_vectors(
        self, rank: int, stream: Stream, frame: TokenFrame, row: int, counts: I32, values: F32
    ) -> None:
        if not len(counts):
            return
        assert frame.vectors is not None
        first, width = int(frame.position[row]), int(frame.vectors.width[row])
        try:
            stream.reply.on_vectors(stream, first, counts, width, values)
        except InvalidOutputError as error:
            self._refuse(rank, stream.handle, error.reason, str(error))
        except Exception:  # noqa: BLE001 - this stream ends, the others go on
            self.break_off(stream)

    def _without_prompts(self, rank: int, frame: TokenFrame, prompt: PromptLogprobs) -> TokenFrame:
        """Deliver prompt logprobs to their streams. Returns the rows that have tokens or a finish."""
        rows, starts = np.unique(prompt.row, return_index=True)
        ends = [*starts.tolist()[1:], len(prompt.row)]
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends, strict=True):
            stream = self.streams[int(frame.stream[row])]
            assert stream is not None  # its rank was checked
            try:
                stream.reply.on_prompt(stream, prompt.slice_entries(start, end))
            except InvalidOutputError as error:
                self._refuse(rank, stream.handle, error.reason, str(error))
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self.break_off(stream)
        remaining = frame.counts() > 0
        if frame.finish is not None:
            remaining |= frame.finish != 0
        return take_rows(msgspec.structs.replace(frame, prompt=None), np.flatnonzero(remaining))

    def _hand_transfers(self, rank: int, given: Mapping[int, KVTransferParams]) -> None:
        for handle, params in given.items():

            def give(stream: Stream, params: KVTransferParams = params) -> None:
                stream.reply.on_transfer(stream, params)

            self._hand(rank, handle, give)

    def hand_routes(self, rank: int, routes: RoutedExperts) -> None:
        """The experts of a stream's tokens, before its last row."""
        self._hand(rank, routes.stream, lambda stream: stream.reply.on_routes(stream, routes))

    def _hand(self, rank: int, handle: int, give: Callable[[Stream], None]) -> None:
        """``give`` a stream's reply what may not be valid."""
        stream = self.running_stream(rank, handle)
        if stream is None:
            return
        try:
            give(stream)
        except InvalidOutputError as error:
            self._refuse(rank, handle, error.reason, str(error))
        except Exception:  # noqa: BLE001 - this stream ends, the others go on
            self.break_off(stream)

    def _handle_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        """The slow path."""
        written = bool(self._columns.written[stream.handle])
        if self._wide.add(stream, tokens, finish, cached, logprobs, written=written):
            self._writer.stop(stream.handle)  # its next rows wait behind this one
        else:
            self._handle_row_now(stream, tokens, finish, cached, logprobs)

    def _handle_row_now(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        """An exception in one stream's reply ends that stream, never the loop."""
        reply = stream.reply
        try:
            reply.on_row(stream, tokens, finish, cached, logprobs)
        except Exception:  # noqa: BLE001 - this stream ends, the others go on
            self.break_off(stream, reply, ended=bool(finish))
        if finish:
            self.close(stream)
        elif self._wide.holds(stream.handle):
            self._writer.stop(stream.handle)  # its reply may have had the next rows written by columns

    def abort_unassigned(self, stream: Stream) -> None:
        """End a stream that no engine runs, with what it has."""
        self._handle_row_now(stream, (), FinishReason.ABORT, 0, None)

    # -- ends by errors

    def fail(self, rank: int, handle: int, error: StreamError) -> None:
        """The engine ended a stream by an error."""
        stream = self.running_stream(rank, handle)
        if stream is not None:
            self.end(stream, error)

    def running_stream(self, rank: int, handle: int) -> Stream | None:
        """The stream of this handle, which engine ``rank`` says to run; None, and a fault, if it does not."""
        stream = self.streams[handle] if handle < len(self.streams) else None
        if stream is not None and stream.rank == rank:
            return stream
        self.faults.record(rank, UNKNOWN_STREAM, "a message about stream %d, which it does not run", handle)
        return None

    def end(self, stream: Stream, error: StreamError) -> None:
        """End a stream that no engine runs any longer."""
        self._fail(stream, stream.reply, error, ended=True)

    def _fail(self, stream: Stream, reply: StreamReply, error: StreamError, *, ended: bool) -> None:
        """End a stream of ``reply``, and abort it at its engine unless that has ``ended`` it."""
        self._wide.finish(stream.handle)
        if stream.state is StreamState.ENDED:
            return  # its last row waited
        wanted = self.is_wanted(stream)
        self.discard(stream)
        try:
            reply.on_failure(stream, error)
        except Exception:  # noqa: BLE001 - this stream ends, the others go on
            _log_fault("end", "stream %d could not be ended", stream.handle, exc_info=True)
        if ended:
            self.close(stream)
        elif wanted:
            self._abort(stream)

    def break_off(self, stream: Stream, reply: StreamReply | None = None, *, ended: bool = False) -> None:
        """The exception at hand is a fault in the handling of one stream, which ends. ``reply``: the
        stream's, if it may have dropped the stream since; ``ended``: the engine has ended the stream."""
        _log_fault("stream", "stream %d failed", stream.handle, exc_info=True)
        ended = ended or self._wide.ended(stream.handle)
        self._wide.drop(stream.handle)
        self._fail(stream, reply or stream.reply, FAULT, ended=ended)

    def _break_all(self, frame: TokenFrame) -> None:
        """The exception at hand broke off the delivery of a frame: its streams may lack tokens, so they
        end."""
        finish = np.zeros(frame.rows, np.int8) if frame.finish is None else frame.finish
        for handle, ended in zip(frame.stream.tolist(), finish.tolist(), strict=True):
            stream = self.streams[handle]
            if stream is not None:
                self.break_off(stream, ended=bool(ended))

    # -- from one engine to another

    def detach_engine(self, rank: int) -> list[Stream]:
        """The engine is gone: takes its streams from it, and returns those whose request still wants
        them."""
        self._versions.pop(rank, None)
        orphans = []
        for handle in np.flatnonzero(self._columns.rank == rank).tolist():
            stream = self.streams[handle]
            assert stream is not None  # closed ones have no rank
            if self._wide.ended(handle):
                self._wide.finish(handle)
                continue
            if stream.state is StreamState.DROPPED:
                self.close(stream)
            else:
                self.detach(stream)
                orphans.append(stream)
        return orphans

    def detach(self, stream: Stream) -> None:
        """No engine runs the stream any longer; it waits for another one."""
        stream.state = next_stream_state(stream.state, StreamEvent.LOSE_ENGINE)
        self._set_engine(stream, NO_ENGINE)

    def is_wanted(self, stream: Stream) -> bool:
        """Whether the stream's request still waits for its tokens."""
        return stream.state in (StreamState.RUNNING, StreamState.INTERRUPTED)

    def is_unassigned(self, stream: Stream) -> bool:
        """Whether the stream waits for an engine."""
        return stream.state is StreamState.INTERRUPTED

    def is_running(self, stream: Stream) -> bool:
        """Whether an engine runs the stream, for its request or until it confirms the drop."""
        return stream.state in (StreamState.RUNNING, StreamState.DROPPED)

    def delivered_tokens(self, streams: Sequence[Stream]) -> list[I32]:
        """The tokens of each stream that have been delivered, int32[n]; needs a log."""
        assert self._log is not None
        return self._log.read([stream.handle for stream in streams])

    def assign(self, stream: Stream, rank: int) -> None:
        """Let engine ``rank`` run the stream from here on; it keeps its handle, its position and its text."""
        stream.state = next_stream_state(stream.state, StreamEvent.ASSIGN)
        self._set_engine(stream, rank)

    def _set_engine(self, stream: Stream, rank: int) -> None:
        self._end_unchanged(stream.rank)
        stream.rank = self._columns.rank[stream.handle] = rank
        self._note_version(stream)


def _no_abort(stream: Stream) -> None:
    """The ``abort`` of a processor without engines."""
