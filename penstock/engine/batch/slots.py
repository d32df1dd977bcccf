"""The running batch as preallocated arrays over slots: histories, finish rules (EOS, stop ids, length), rows.

A slot holds one running stream. A step's work for all running streams (append the sampled tokens, find the
streams that finish, build the rows to send) is array operations over slots; Python code runs only per stream
that starts or ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import StepRows, StreamFailure
from penstock.engine.batch.sparse_zeros import sparse_zeros
from penstock.engine.batch.token_sets import TokenSets
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import Submit

if TYPE_CHECKING:
    from penstock.engine.lora.adapter_table import LoadedAdapter

_LENGTH = np.int8(FinishReason.LENGTH)
LONG_INTERVAL = 128
"""Interval from which on rows travel together: with one that is due go others that hold half of theirs. Soon
all are in the same frames, and frames are what costs an API server time: one of a single row 0.3 ms."""
FAILED = np.int8(-1)
"""In a column of ends, beside the FinishReasons: the stream ends by an error. A column has one value per
stream, so that no stream can end twice."""


class SlotTable:
    """Arrays with one entry per slot; histories of up to ``max_model_len`` tokens.

    ``history`` is int32[slots, max_model_len], the prompt followed by the output; the operating system
    commits only the pages that are written.
    """

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        vocab_size: int = 1 << 18,
    ) -> None:
        """``vocab_size``: sampled tokens are below it, and stop ids that are not are left out."""
        self.size = slots
        self.max_model_len = max_model_len
        self.eos = np.array(sorted(set(eos_token_ids)), np.int32)

        # -- per stream
        self.server = np.zeros(slots, np.int32)
        self.stream = np.zeros(slots, np.int32)
        self.base = np.zeros(slots, np.int32)
        """Prompt tokens before the stream's position 0 (the prompt of a resumed stream includes output)."""
        self.prompt_len = np.zeros(slots, np.int32)
        self.end = np.zeros(slots, np.int32)
        """Length of the history at which the stream finishes with LENGTH."""
        self.min_end = np.zeros(slots, np.int32)
        """Length of the history up to which EOS and stop ids do not end the stream (min_tokens)."""
        self.ignore_eos = np.zeros(slots, np.bool_)
        self.stop_ids = TokenSets(slots, vocab_size)
        self.interval = np.ones(slots, np.int32)
        """Minimum tokens per row, except for the first and the last row."""
        self.interval_s = np.zeros(slots)
        """Minimum seconds between rows, likewise; 0: no minimum."""
        self.cached = np.zeros(slots, np.int32)
        """Prompt tokens found in the prefix cache."""
        self.seed = np.zeros(slots, np.uint64)
        self.generation = np.zeros(slots, np.int64)
        """Streams that have left the slot: distinguishes its streams from one another."""
        self._timed = 0
        """Slots with an ``interval_s``."""
        self.adapters: dict[int, LoadedAdapter] = {}
        """LoRA adapters by slot; slots without one run the base model."""

        # -- per step
        self.length = np.zeros(slots, np.int32)
        self.in_flight_tokens = np.zeros(slots, np.int32)
        """Sampled tokens that follow the history and are still on the device only."""
        self.sent = np.zeros(slots, np.int32)
        """Length of the history that rows have been made for."""
        self.history: I32 = sparse_zeros((slots, max_model_len), np.int32)
        self._sent_at = np.zeros(slots)
        """Time of the last row, for slots with an ``interval_s``."""
        self._clock = clock
        self._now = 0.0
        """Time at which the step's tokens were appended, if any slot has an ``interval_s``."""

        self.notify_start: Callable[[int, int], None] = _ignore_start
        """Called with the API server and handle of each resubmitted stream that is given a slot."""
        self._free = list(range(slots - 1, -1, -1))
        self._by_stream: dict[tuple[int, int], int] = {}
        self._admitted: list[tuple[int, int]] = []
        self._preempted: list[tuple[int, int]] = []
        self.generated = 0
        """Tokens appended since the start."""

    # -- streams come and go

    def free_count(self) -> int:
        return len(self._free)

    def running(self) -> int:
        return self.size - len(self._free)

    def allocate(self, server: int, request: Submit, adapter: LoadedAdapter | None = None) -> int:
        """Give a free slot to a request whose prompt is shorter than max_model_len, and which runs with
        ``adapter``. Returns the slot."""
        slot = self._free.pop()
        prompt = np.frombuffer(request.prompt, "<i4")
        sampling = request.sampling
        length = len(prompt)
        base = length - request.resumed
        self.server[slot] = server
        self.stream[slot] = request.stream
        self.base[slot] = base
        self.prompt_len[slot] = self.length[slot] = self.sent[slot] = length
        self.end[slot] = min(base + sampling.max_tokens, self.max_model_len)
        self.min_end[slot] = min(base + sampling.min_tokens, self.max_model_len)
        self.ignore_eos[slot] = sampling.ignore_eos
        self.interval[slot] = request.interval
        if request.interval_ms:
            self.interval_s[slot] = request.interval_ms / 1000
            self._timed += 1
        self.cached[slot] = 0
        self.seed[slot] = sampling.seed
        self.history[slot, :length] = prompt
        if sampling.stop_token_ids:
            self.stop_ids.set(slot, sampling.stop_token_ids)
        if adapter is not None:
            self.adapters[slot] = adapter
            adapter.streams += 1
        self._by_stream[server, request.stream] = slot
        self._admitted.append((server, request.stream))
        if request.resubmitted:
            self.notify_start(server, request.stream)
        return slot

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        """Streams, as (API server, handle), that were given a slot since the last call."""
        if not self._admitted:
            return ()
        admitted, self._admitted = self._admitted, []
        return admitted

    def note_preemption(self, slot: int) -> None:
        """The slot's stream gave its KV blocks back."""
        self._preempted.append((int(self.server[slot]), int(self.stream[slot])))

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        """Streams, as (API server, handle), that were preempted since the last call."""
        if not self._preempted:
            return ()
        preempted, self._preempted = self._preempted, []
        return preempted

    def find_slot(self, server: int, stream: int) -> int | None:
        return self._by_stream.get((server, stream))

    def release(self, slot: int) -> None:
        del self._by_stream[int(self.server[slot]), int(self.stream[slot])]
        self.stop_ids.clear(slot)
        if self.adapters and (adapter := self.adapters.pop(slot, None)) is not None:
            adapter.streams -= 1
        if self.interval_s[slot]:
            self.interval_s[slot] = 0
            self._timed -= 1
        self.in_flight_tokens[slot] = 0
        self.generation[slot] += 1
        self._free.append(slot)

    def running_slots(self) -> list[int]:
        """The slots that have a stream."""
        return list(self._by_stream.values())

    def slots_of(self, server: int) -> list[int]:
        return [slot for (owner, _), slot in self._by_stream.items() if owner == server]

    def failure(self, slot: int, code: str, message: str) -> StreamFailure:
        """The end of the slot's stream by an error, after all its tokens."""
        return StreamFailure(
            server=int(self.server[slot]),
            stream=int(self.stream[slot]),
            position=int(self.length[slot] - self.base[slot]),
            code=code,
            message=message,
        )

    def fail_all(
        self,
        code: str,
        message: str,
        take_logprobs: Callable[[NDArray[np.intp]], Logprobs | None] = lambda slots: None,
    ) -> StepRows:
        """:meth:`fail` for every stream."""
        slots = np.fromiter(self._by_stream.values(), np.intp, len(self._by_stream))
        return self.fail(slots, code, message, take_logprobs)

    def fail(
        self,
        slots: NDArray[np.intp],
        code: str,
        message: str,
        take_logprobs: Callable[[NDArray[np.intp]], Logprobs | None] = lambda slots: None,
    ) -> StepRows:
        """End streams with an error: rows of the tokens that were held back, then a failure each.

        ``take_logprobs`` returns the logprobs of all held tokens of some slots, whose ``token`` indexes those
        tokens. Needs only ``length`` and ``sent`` to be consistent, so it can be called after a step that
        raised.
        """
        failures = [self.failure(slot, code, message) for slot in slots.tolist()]
        rows = self.flush(slots, take_logprobs)
        rows.failed = failures
        for slot in slots.tolist():
            self.release(slot)
        return rows

    def flush(
        self, slots: NDArray[np.intp], take_logprobs: Callable[[NDArray[np.intp]], Logprobs | None]
    ) -> StepRows:
        """Rows of the tokens of some slots that were held back. ``take_logprobs`` as in :meth:`fail`."""
        held = slots[self.length[slots] > self.sent[slots]]
        logprobs = take_logprobs(held)
        rows = self._rows_of(held, np.zeros(len(held), np.int8))
        rows.logprobs = logprobs
        return rows

    # -- the step

    def append(self, slots: NDArray[np.intp], tokens: I32) -> I32:
        """Append one sampled token to each slot's history. Returns int32[R], the new lengths."""
        if self._timed:
            self._now = self._clock()
        self.generated += len(slots)
        length = self.length[slots]
        self.history[slots, length] = tokens
        length += 1
        self.length[slots] = length
        return length

    def append_and_check_stop(self, slots: NDArray[np.intp], tokens: I32) -> I8:
        """:meth:`append`, and apply the finish rules: max_tokens and max_model_len, stop token ids, EOS.

        Returns int8[R], the FinishReason of each slot. EOS takes precedence over a stop id, which takes
        precedence over the length.
        """
        return self.check_stop(slots, tokens, self.append(slots, tokens))

    def check_stop(self, slots: NDArray[np.intp], tokens: I32, length: I32) -> I8:
        """int8[R]: the FinishReason of streams whose last token is ``tokens``, with which their histories
        have ``length`` tokens. A slot may occur several times."""
        finish: I8 = (length >= self.end[slots]).view(np.int8)
        finish *= _LENGTH
        counts = length > self.min_end[slots]
        if self.stop_ids:
            finish[self.stop_ids.contain(slots, tokens) & counts] = FinishReason.STOP_TOKEN
        for eos in self.eos:
            is_eos = tokens == eos
            if np.count_nonzero(is_eos):  # in a third of the time of any(), whose part of it is Python
                finish[is_eos & counts & ~self.ignore_eos[slots]] = FinishReason.EOS
        return finish

    def append_runs(self, slots: NDArray[np.intp], tokens: I32, count: I32) -> None:
        """Append ``count`` int32[R] tokens to each slot's history; ``tokens`` has them one after another."""
        if self._timed:
            self._now = self._clock()
        self.generated += len(tokens)
        length = self.length[slots]
        self.history.reshape(-1)[self._places(slots, length, count)] = tokens
        self.length[slots] = length + count

    def due(self, slots: NDArray[np.intp], finish: I8) -> NDArray[np.bool_]:
        """bool[R]: the slots that :meth:`rows` makes a row for."""
        sent, interval = self.sent[slots], self.interval[slots]
        held = self.length[slots] - sent
        due: NDArray[np.bool_] = held >= interval
        if np.count_nonzero(due) < len(due):
            long = interval >= LONG_INTERVAL
            if np.count_nonzero(due & long):
                due |= long & (2 * held >= interval)
        if self._timed:
            due &= self._now - self._sent_at[slots] >= self.interval_s[slots]
        if np.count_nonzero(due) < len(due):
            due |= (finish != 0) | (sent == self.prompt_len[slots])
        return due

    def rows(self, slots: NDArray[np.intp], finish: I8, due: NDArray[np.bool_] | None = None) -> StepRows:
        """The rows that are due: a stream's first token, its end, or a full interval of tokens.

        ``finish``: int8[R], the FinishReason of each slot, or FAILED: :meth:`failure` is then the stream's
        end, after its row. ``due``: the answer of :meth:`due`, if it is known. Tokens that are held back stay
        in the history, so rows of several tokens are one gather.
        """
        if due is None:
            due = self.due(slots, finish)
        if np.count_nonzero(due) < len(due):
            slots, finish = slots[due], finish[due]
        if self._timed:
            self._sent_at[slots] = self._now
        return self._rows_of(slots, finish)

    def flush_next(self, slot: int) -> None:
        """Make the slot's held tokens due with the next rows."""
        self.interval[slot] = 1
        self._sent_at[slot] = -np.inf

    def _rows_of(self, slots: NDArray[np.intp], finish: I8) -> StepRows:
        """Rows of all tokens that the slots hold; they count as sent."""
        length, sent = self.length[slots], self.sent[slots]
        count = length - sent
        self.sent[slots] = length
        one_each = not np.count_nonzero(count != 1)
        first = sent == self.prompt_len[slots]
        cached = self.cached[slots] * first if np.count_nonzero(first) else None
        return StepRows(
            server=self.server[slots],
            stream=self.stream[slots],
            position=sent - self.base[slots],
            tokens=self.history[slots, sent] if one_each else self._tokens(slots, sent, count),
            count=None if one_each else count,
            finish=finish.clip(0) if np.count_nonzero(finish) else None,
            cached=cached if cached is not None and np.count_nonzero(cached) else None,
        )

    def _tokens(self, slots: NDArray[np.intp], start: I32, count: I32) -> I32:
        gathered: I32 = self.history.reshape(-1).take(self._places(slots, start, count))
        return gathered

    def _places(self, slots: NDArray[np.intp], start: I32, count: I32) -> NDArray[np.intp]:
        """intp[sum of count]: indexes into the flat histories of ``count`` tokens from ``start`` on."""
        first = slots * self.max_model_len + start
        most = int(count.max(initial=0))
        if int(count.sum()) == most * len(count):
            return (first[:, None] + np.arange(most)).reshape(-1)
        return (first - np.cumsum(count) + count).repeat(count) + np.arange(int(count.sum()))


def _ignore_start(server: int, stream: int) -> None:
    """The ``notify_start`` of a table that no loop uses."""
