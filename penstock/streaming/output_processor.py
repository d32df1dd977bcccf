"""Delivers the rows of token frames to their streams: tokens to text to events, one loop per frame."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.metrics.histogram import Histogram
from penstock.streaming.event_writer import EventWriter
from penstock.streaming.io_submit import BurstWriter, write_each
from penstock.streaming.request_states import StreamEvent, StreamState, next_stream_state
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_log import TokenLog
from penstock.wire.arrays import I32
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, WireError
from penstock.wire.regroup import take_rows

log = logging.getLogger(__name__)

NO_ENGINE = -1
"""Rank of a stream that no engine runs: its engine is gone, and it waits for another."""

_FAULT = StreamError(500, "internal_error", "The server failed to handle this stream.")


class _Discard:
    """The reply of streams that no request wants: counts their tokens until the engine has ended them."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        self.tokens += len(tokens)

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        pass

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        pass

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        pass


class OutputProcessor:
    """The streams of one API server. Handles are indexes into ``streams`` and into arrays that double.

    A handle is reused only after its engine has ended the stream (a finish row, a failure, the engine's
    death): rows in flight for an aborted stream can never reach another one.
    """

    def __init__(
        self,
        texts: Sequence[bytes | None],
        ttft: Histogram,
        itl: Histogram,
        event_tokens: Histogram,
        log: TokenLog | None = None,
        burst: BurstWriter = write_each,
        capacity: int = 1024,
    ) -> None:
        """``texts``: per token id of the model, the token's text if it is context-free, else None.

        ``ttft`` and ``itl`` observe all rows, in seconds; ``event_tokens`` the tokens per row of streamed
        replies. ``log`` keeps delivered tokens; without it streams cannot be resumed on another engine.
        ``burst`` writes to the sockets of streams that have a descriptor.
        """
        self.streams: list[Stream | None] = [None] * capacity
        self.generated_tokens = 0
        """Tokens received."""
        self._free = list(range(capacity - 1, -1, -1))
        self._position = np.zeros(capacity, np.int32)
        self._rank = np.full(capacity, NO_ENGINE, np.int32)
        self._arrival = np.zeros(capacity)
        self._last = np.zeros(capacity)
        self._written = np.zeros(capacity, np.bool_)
        """Whether the stream's rows become events, as in a streamed reply."""
        self._texts = np.array(texts, np.object_)
        self._ttft = ttft
        self._itl = itl
        self._event_tokens = event_tokens
        self._log = log
        self._writer = EventWriter(self.streams, burst, self._row)
        self._discard = _Discard()

    def __len__(self) -> int:
        """Open streams, including aborted ones that their engine has not confirmed yet."""
        return len(self.streams) - len(self._free)

    # -- streams come and go

    def open(self, stream: Stream, arrival: float) -> int:
        """Give a new stream a handle. ``arrival``: monotonic seconds when its request arrived."""
        stream.state = next_stream_state(stream.state, StreamEvent.OPEN)
        if not self._free:
            self._grow()
        handle = self._free.pop()
        self.streams[handle] = stream
        stream.handle = handle
        self._position[handle] = 0
        self._rank[handle] = stream.rank
        self._arrival[handle] = self._last[handle] = arrival
        self._written[handle] = bool(stream.head)
        if self._log is not None:
            self._log.open(handle)
        return handle

    def num_delivered(self, stream: Stream) -> int:
        """Tokens of the stream that have been delivered."""
        return int(self._position[stream.handle])

    @property
    def discarded_tokens(self) -> int:
        """The part of ``generated_tokens`` that no request wanted any more."""
        return self._discard.tokens

    def discard_tokens(self, count: int) -> None:
        """Counts tokens that a reply received and did not output."""
        self._discard.tokens += count

    def discard(self, stream: Stream) -> None:
        """Drop a stream that its request no longer wants; the handle is free once the engine has ended it."""
        stream.state = next_stream_state(stream.state, StreamEvent.DROP)
        stream.reply = self._discard
        stream.fast_path = False

    def close(self, stream: Stream) -> None:
        """End a stream and free its handle; a stream that has ended stays as it is."""
        ended = stream.state is StreamState.ENDED
        stream.state = next_stream_state(stream.state, StreamEvent.END)
        if ended:
            return
        handle = stream.handle
        self.streams[handle] = None
        self._rank[handle] = NO_ENGINE
        self._written[handle] = False
        self._free.append(handle)
        if self._log is not None:
            self._log.close(handle)

    def streams_idle_since(self, since: float) -> list[Stream]:
        """Open streams that write events and have had no row since the monotonic time ``since``."""
        quiet = np.flatnonzero(self._written & (self._last <= since))
        streams = (self.streams[handle] for handle in quiet.tolist())
        return [stream for stream in streams if stream is not None]

    def adapter_counts(self) -> Counter[tuple[str, str]]:
        """Number of open streams per (adapter name, state); "running" after the first token, else
        "waiting"."""
        found: Counter[tuple[str, str]] = Counter()
        for stream in self.streams:
            if stream is not None and stream.request is not None and stream.request.adapter is not None:
                state = "running" if self._position[stream.handle] else "waiting"
                found[stream.request.adapter, state] += 1
        return found

    def _grow(self) -> None:
        old = len(self.streams)
        self.streams.extend([None] * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))
        self._position = np.concatenate((self._position, np.zeros(old, np.int32)))
        self._rank = np.concatenate((self._rank, np.full(old, NO_ENGINE, np.int32)))
        self._arrival = np.concatenate((self._arrival, np.zeros(old)))
        self._last = np.concatenate((self._last, np.zeros(old)))
        self._written = np.concatenate((self._written, np.zeros(old, np.bool_)))

    # -- rows arrive

    def process_frame(self, rank: int, frame: TokenFrame, now: float) -> None:
        """Delivers a frame's rows to their streams. Raises WireError if a row does not fit its stream."""
        handles = frame.stream
        if not len(handles):
            return
        if int(handles.max()) >= len(self.streams):
            raise WireError(f"row for stream {int(handles.max())}, which never was")
        if len(frame.tokens) and int(frame.tokens.max()) >= len(self._texts):
            raise WireError(f"token id {int(frame.tokens.max())} is not below {len(self._texts)}")
        expected = self._position.take(handles)
        sound = (expected == frame.position) & (self._rank.take(handles) == rank)
        if not sound.all():
            self._refuse(handles[~sound], rank)
            raise WireError(f"rows out of order for {int((~sound).sum())} streams of engine {rank}")
        if frame.prompt is not None:
            frame = self._without_prompts(frame, frame.prompt)
            handles, expected = frame.stream, frame.position
            if not len(handles):
                return
        if frame.kv_transfer_params is not None:
            self._hand_transfers(frame.kv_transfer_params)
        self._position[handles] = expected + (1 if frame.count is None else frame.count)
        self._record_latency(frame, now)
        self._record_sizes(frame)
        self.generated_tokens += len(frame.tokens)
        if self._log is not None:
            self._log.append(handles, frame.tokens, frame.count)
        texts = self._texts.take(frame.tokens).tolist()
        if frame.finish is None and frame.count is None and frame.cached is None and frame.logprobs is None:
            self._writer.write_single_token_rows(handles.tolist(), frame.tokens.tolist(), texts)
        else:
            self._writer.write_rows(frame, handles.tolist(), texts)

    def _without_prompts(self, frame: TokenFrame, prompt: PromptLogprobs) -> TokenFrame:
        """Delivers prompt logprobs to their streams. Returns the rows that have tokens or a finish."""
        rows, starts = np.unique(prompt.row, return_index=True)
        ends = [*starts.tolist()[1:], len(prompt.row)]
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends, strict=True):
            stream = self.streams[int(frame.stream[row])]
            assert stream is not None  # its rank was checked
            try:
                stream.reply.on_prompt(stream, prompt.slice_entries(start, end))
            except Exception:
                log.exception("stream %d failed", stream.handle)
                self._fail(stream, _FAULT)
        remaining = frame.counts() > 0
        if frame.finish is not None:
            remaining |= frame.finish != 0
        return take_rows(replace(frame, prompt=None), np.flatnonzero(remaining))

    def _hand_transfers(self, given: Mapping[int, KVTransferParams]) -> None:
        for handle, params in given.items():
            stream = self.streams[handle]
            assert stream is not None  # it has a row, whose rank was checked
            stream.reply.on_transfer(stream, params)

    def _row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        """The slow path. An exception in one stream's reply ends that stream, never the loop."""
        try:
            stream.reply.on_row(stream, tokens, finish, cached, logprobs)
        except Exception:
            log.exception("stream %d failed", stream.handle)
            self._fail(stream, _FAULT)
        if finish:
            self.close(stream)

    # -- ends by errors

    def fail(self, rank: int, handle: int, error: StreamError) -> None:
        """The engine ended a stream by an error."""
        self.end(self.running_stream(rank, handle), error)

    def running_stream(self, rank: int, handle: int) -> Stream:
        """The stream of this handle, which engine ``rank`` says to run. Raises WireError when it does not."""
        stream = self.streams[handle] if handle < len(self.streams) else None
        if stream is None or stream.rank != rank:
            raise WireError(f"failure of stream {handle}, which engine {rank} does not run")
        return stream

    def end(self, stream: Stream, error: StreamError) -> None:
        """End a stream that no engine runs any longer."""
        self._fail(stream, error)
        self.close(stream)

    def _fail(self, stream: Stream, error: StreamError) -> None:
        reply = stream.reply
        self.discard(stream)
        try:
            reply.on_failure(stream, error)
        except Exception:
            log.exception("stream %d could not be ended", stream.handle)

    def _refuse(self, handles: I32, rank: int) -> None:
        error = StreamError(500, "engine_error", "The engine's tokens arrived out of order.")
        for handle in handles.tolist():
            stream = self.streams[handle]
            if stream is not None and stream.rank == rank:
                self._fail(stream, error)

    # -- from one engine to another

    def detach_engine(self, rank: int) -> list[Stream]:
        """The engine is gone: takes its streams from it, and returns those whose request still wants
        them."""
        orphans = []
        for handle in np.flatnonzero(self._rank == rank).tolist():
            stream = self.streams[handle]
            assert stream is not None  # closed ones have no rank
            if stream.state is StreamState.DROPPED:
                self.close(stream)
            else:
                stream.state = next_stream_state(stream.state, StreamEvent.LOSE_ENGINE)
                self._set_engine(stream, NO_ENGINE)
                orphans.append(stream)
        return orphans

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
        stream.rank = self._rank[stream.handle] = rank

    # -- metrics, by whole columns

    def _record_latency(self, frame: TokenFrame, now: float) -> None:
        handles = frame.stream
        first = frame.position == 0
        if first.any():
            opened = handles[first]
            self._ttft.observe(now - self._arrival[opened])
            later = handles[~first]
        else:
            later = handles
        if len(later):
            self._itl.observe(now - self._last.take(later))
        self._last[handles] = now

    def _record_sizes(self, frame: TokenFrame) -> None:
        written = self._written.take(frame.stream)
        if frame.count is None:
            self._event_tokens.add(1.0, int(np.count_nonzero(written)))
        else:
            self._event_tokens.observe(frame.count[written])
