"""The batch as columns: one row of preallocated arrays per slot.

A slot holds one running stream. What happens to all running streams in a step (take the sampled tokens,
find those that end, build the rows to send) is array operations over slots; Python touches only requests
that start or end.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..wire.frames import I8, I32, Finish
from ..wire.messages import Submit
from .base import StepRows

STOP_IDS_PER_SLOT = 8
"""Stop token ids kept in the slot's row; the rare longer list is checked apart."""


class SlotTable:
    """Columns of ``slots`` rows; histories of up to ``max_model_len`` tokens.

    ``history`` is int32[slots, max_model_len], the prompt followed by the output; untouched pages of it
    are never committed by the operating system.
    """

    def __init__(self, slots: int, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        self.size = slots
        self.max_model_len = max_model_len
        self.eos = np.array(sorted(set(eos_token_ids)), np.int32)

        # -- per stream
        self.server = np.zeros(slots, np.int32)
        self.stream = np.zeros(slots, np.int32)
        self.base = np.zeros(slots, np.int32)
        """Prompt tokens before the stream's position 0 (a resumed stream's prompt holds output, too)."""
        self.prompt_len = np.zeros(slots, np.int32)
        self.end = np.zeros(slots, np.int32)
        """Length of the history at which the stream ends by length."""
        self.min_end = np.zeros(slots, np.int32)
        """Length of the history before which EOS and stop ids do not count."""
        self.ignore_eos = np.zeros(slots, np.bool_)
        self.stop_ids = np.full((slots, STOP_IDS_PER_SLOT), -1, np.int32)
        self.interval = np.ones(slots, np.int32)
        self.cached = np.zeros(slots, np.int32)
        self.seed = np.zeros(slots, np.uint64)
        self._long_stop_ids: dict[int, NDArray[np.int32]] = {}

        # -- per step
        self.length = np.zeros(slots, np.int32)
        self.sent = np.zeros(slots, np.int32)
        """Length of the history up to which rows have been given out."""
        self.history = np.zeros((slots, max_model_len), np.int32)

        self._free = list(range(slots - 1, -1, -1))
        self._by_stream: dict[tuple[int, int], int] = {}

    # -- streams come and go

    def free_count(self) -> int:
        return len(self._free)

    def running(self) -> int:
        return self.size - len(self._free)

    def allocate(self, server: int, request: Submit) -> int:
        """Take a free slot for a request whose prompt leaves room for a token. Returns the slot."""
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
        self.min_end[slot] = base + sampling.min_tokens
        self.ignore_eos[slot] = sampling.ignore_eos
        self.interval[slot] = request.interval
        self.cached[slot] = 0
        self.seed[slot] = sampling.seed
        self.history[slot, :length] = prompt
        self._set_stop_ids(slot, sampling.stop_token_ids)
        self._by_stream[server, request.stream] = slot
        return slot

    def _set_stop_ids(self, slot: int, stop_ids: Sequence[int]) -> None:
        row = self.stop_ids[slot]
        row[:] = -1
        row[: len(stop_ids)] = stop_ids[:STOP_IDS_PER_SLOT]
        if len(stop_ids) > STOP_IDS_PER_SLOT:
            self._long_stop_ids[slot] = np.array(stop_ids[STOP_IDS_PER_SLOT:], np.int32)

    def find(self, server: int, stream: int) -> int | None:
        return self._by_stream.get((server, stream))

    def release(self, slot: int) -> None:
        del self._by_stream[int(self.server[slot]), int(self.stream[slot])]
        self._long_stop_ids.pop(slot, None)
        self._free.append(slot)

    def slots_of(self, server: int) -> list[int]:
        return [slot for (owner, _), slot in self._by_stream.items() if owner == server]

    # -- the step

    def settle(self, slots: NDArray[np.intp], tokens: I32) -> I8:
        """Append one sampled token to each slot's history. Returns int8[R] Finish per slot."""
        length = self.length[slots]
        self.history[slots, length] = tokens
        length += 1
        self.length[slots] = length
        counts = length > self.min_end[slots]
        is_eos = np.isin(tokens, self.eos) & ~self.ignore_eos[slots] & counts
        is_stop = (self.stop_ids[slots] == tokens[:, None]).any(axis=1) & counts
        if self._long_stop_ids:
            self._mark_long_stops(slots, tokens, counts, is_stop)
        finish = np.where(length >= self.end[slots], np.int8(Finish.LENGTH), np.int8(Finish.NONE))
        finish[is_stop] = Finish.STOP_TOKEN
        finish[is_eos] = Finish.EOS
        return finish

    def _mark_long_stops(
        self, slots: NDArray[np.intp], tokens: I32, counts: NDArray[np.bool_], is_stop: NDArray[np.bool_]
    ) -> None:
        for slot, stop_ids in self._long_stop_ids.items():
            for row in np.flatnonzero((slots == slot) & counts):
                is_stop[row] |= tokens[row] in stop_ids

    def rows(self, slots: NDArray[np.intp], finish: I8) -> StepRows:
        """The rows that are due: a stream's first token, its end, or an interval full of tokens.

        Held tokens stay in the history, so a row of several tokens is one gather.
        """
        length, sent = self.length[slots], self.sent[slots]
        held = length - sent
        due = (held >= self.interval[slots]) | (finish != 0) | (sent == self.prompt_len[slots])
        if not due.all():
            slots, finish, length, sent, held = slots[due], finish[due], length[due], sent[due], held[due]
        self.sent[slots] = length
        first = sent == self.prompt_len[slots]
        cached = np.where(first, self.cached[slots], 0)
        return StepRows(
            self.server[slots],
            self.stream[slots],
            sent - self.base[slots],
            self._tokens(slots, sent, held),
            None if (held == 1).all() else held,
            finish if finish.any() else None,
            cached if cached.any() else None,
        )

    def _tokens(self, slots: NDArray[np.intp], start: I32, count: I32) -> I32:
        if (count == 1).all():
            tokens: I32 = self.history[slots, start]
            return tokens
        ends = np.cumsum(count)
        within = np.arange(int(ends[-1])) - np.repeat(ends - count, count)
        gathered: I32 = self.history[np.repeat(slots, count), np.repeat(start, count) + within]
        return gathered
