"""Buffers the logprobs of sampled tokens whose row is not due yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.sparse_zeros import sparse_zeros
from penstock.wire.arrays import F32, I32
from penstock.wire.logprobs import Logprobs, concat_logprobs


def read_candidates(
    row: NDArray[np.intp], wanted: I32, ids: NDArray[np.int64], values: F32, rank: NDArray[np.int64]
) -> Logprobs:
    """The logprobs of sampled tokens, from columns that a device computed for all of them: ``ids`` and
    ``values`` [L, W], each token's own first, of which L rows ``wanted`` so many others. ``row``: of the
    tokens in their step, ascending. ``values`` are copied."""
    found = Logprobs(row.astype(np.int32), ids.astype(np.int32), values.copy(), rank.astype(np.int32))
    if ids.shape[1] > 1:
        beyond = np.arange(ids.shape[1]) > wanted[:, None]
        found.ids[beyond] = -1
        found.values[beyond] = -np.inf
    return found.split()


class LogprobsBuffer:
    """Logprobs of sampled tokens, returned with the row that carries the token.

    A stream that asked for logprobs has them for every token, so the entry of the n-th held token of a slot
    is at n: arrays [slots, tokens, candidates], which grow by doubling. Memory is committed where it is used.
    Tokens with several entries are kept apart: they are few, and leave as soon as they are made.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._ids: I32 = np.zeros((table.size, 0, 0), np.int32)
        self._values: F32 = np.zeros((table.size, 0, 0), np.float32)
        self._rank: I32 = np.zeros((table.size, 0), np.int32)
        self._wide: dict[int, list[Logprobs]] = {}
        """Entries by slot, of its tokens with several; ``token`` counts its held tokens."""

    def append_and_take_due(
        self, slots: NDArray[np.intp], due: NDArray[np.bool_], sampled: Logprobs | None
    ) -> Logprobs | None:
        """:meth:`append` and :meth:`take_due` for one token per slot; copies nothing when all are due at
        once."""
        if sampled is None:
            return None
        held = self._table.length[slots] - self._table.sent[slots]
        if np.count_nonzero(due) == len(due) == np.count_nonzero(held == 1):
            return sampled
        self.append(slots, held - 1, sampled)
        if len(sampled.token) == len(slots) and not self._wide:  # every stream wants them, one entry each
            released = np.flatnonzero(due)
            counts = held[released]
            return self._release(slots[released], counts)
        wanting = np.zeros(len(slots), np.bool_)
        wanting[sampled.token] = True
        return self.take_due(slots, due, wanting)

    def append_runs_and_take_due(
        self,
        slots: NDArray[np.intp],
        count: I32,
        due: NDArray[np.bool_],
        wanting: NDArray[np.bool_],
        sampled: Logprobs | None,
    ) -> Logprobs | None:
        """:meth:`append` and :meth:`take_due` for ``count`` int32[n] tokens per slot, one after another;
        ``sampled.token`` indexes them. ``wanting``: the slots that have logprobs."""
        held = self._table.length[slots] - self._table.sent[slots]
        if due.all() and (held == count).all():
            return sampled
        if sampled is not None:
            index = np.arange(int(count.sum()), dtype=np.int32) + np.repeat(held - np.cumsum(count), count)
            self.append(np.repeat(slots, count), index, sampled)
        return self.take_due(slots, due, wanting)

    def append(self, slots: NDArray[np.intp], index: I32, sampled: Logprobs) -> None:
        """Buffer the logprobs of tokens: ``index`` int32[n] of each among the held tokens of its slot.
        ``sampled.token`` indexes both."""
        if self._wide or sampled.is_split():
            continues = sampled.continues()
            wide = np.isin(sampled.token, sampled.token[continues])
            self._hold_wide(slots, index, sampled, wide)
            narrow = sampled.select_entries(np.flatnonzero(~wide), sampled.token[~wide])
            if narrow is None:
                return
            width = int((narrow.ids >= 0).any(axis=0).sum())
            sampled = Logprobs(narrow.token, narrow.ids[:, :width], narrow.values[:, :width], narrow.rank)
        row = sampled.token
        if len(row) < len(slots):
            slots, index = slots[row], index[row]
        self._hold(slots, index, sampled)

    def _hold_wide(
        self, slots: NDArray[np.intp], index: I32, sampled: Logprobs, wide: NDArray[np.bool_]
    ) -> None:
        """Keep the entries in the mask ``wide`` by slot."""
        rows = np.unique(sampled.token)
        begun = slots[rows[index[rows] == 0]].tolist()
        for slot in self._wide.keys() & begun:
            del self._wide[slot]  # of a stream that has left
        for row in np.unique(sampled.token[wide]):
            low, high = np.searchsorted(sampled.token, (row, row + 1))
            at = np.full(high - low, index[row], np.int32)
            taken = sampled.select_entries(np.arange(low, high), at)
            assert taken is not None
            self._wide.setdefault(int(slots[row]), []).append(taken)

    def take_due(
        self, slots: NDArray[np.intp], due: NDArray[np.bool_], wanting: NDArray[np.bool_]
    ) -> Logprobs | None:
        """Logprobs for the rows that are due, from the slots ``wanting`` logprobs, which have an entry for
        every held token. The result's ``token`` indexes the tokens of those rows. Call it before the rows are
        made."""
        held = self._table.length[slots] - self._table.sent[slots]
        given = np.where(due, held, 0)
        released = np.flatnonzero(wanting & (given > 0))
        if not len(released):
            return None
        first = np.cumsum(given) - given
        if not self._wide:
            return self._release(slots[released], held[released], first[released])
        wide = [row for row in released.tolist() if int(slots[row]) in self._wide]
        parts = [part.moved_by(int(first[row])) for row in wide for part in self._wide.pop(int(slots[row]))]
        others = np.setdiff1d(released, wide)
        if len(others):
            narrow = self._release(slots[others], held[others], first[others])
            assert narrow is not None
            parts.append(narrow)
        whole = concat_logprobs(parts)
        assert whole is not None
        order = np.argsort(whole.token, kind="stable")
        return whole.select_entries(order, whole.token[order])

    def take_held(self, slots: NDArray[np.intp], wanting: NDArray[np.bool_]) -> Logprobs | None:
        """:meth:`take_due` for all held tokens of some slots; ``wanting``: per slot of the table."""
        if not len(slots):
            return None
        held = self._table.length[slots] - self._table.sent[slots]
        self._make_room(int(held.max()), 1)  # a step that raised may have appended a token without logprobs
        return self.take_due(slots, np.ones(len(slots), np.bool_), wanting[slots])

    def _hold(self, slots: NDArray[np.intp], index: I32, sampled: Logprobs) -> None:
        width = sampled.ids.shape[1]
        self._make_room(int(index.max()) + 1, width)
        at = slots * self._rank.shape[1] + index
        self._rank.reshape(-1)[at] = sampled.rank
        if self._ids.shape[2] == 1:
            self._ids.reshape(-1)[at] = sampled.ids.reshape(-1)
            self._values.reshape(-1)[at] = sampled.values.reshape(-1)
            return
        self._ids[slots, index, :width] = sampled.ids
        self._ids[slots, index, width:] = -1
        self._values[slots, index, :width] = sampled.values
        self._values[slots, index, width:] = -np.inf

    def _release(
        self, slots: NDArray[np.intp], held: I32, first: NDArray[np.intp] | None = None
    ) -> Logprobs | None:
        """All entries of the slots, None without slots. ``held``: how many each slot has; ``first``: index of
        its first token, None if no others' stand between."""
        if not len(slots):
            return None
        most, width = self._ids.shape[1:]
        ends = np.cumsum(held)
        token = np.arange(int(ends[-1]), dtype=np.int32)
        begins = ends - held
        at = token + (slots * most - begins).repeat(held)
        if first is not None:
            token += (first - begins).repeat(held).astype(np.int32)
        ids = self._ids.reshape(-1, width).take(at, axis=0)
        values = self._values.reshape(-1, width).take(at, axis=0)
        if width > 1:  # other streams may have more candidates
            own = int((ids >= 0).any(axis=0).sum())
            ids, values = ids[:, :own], values[:, :own]
        return Logprobs(token, ids, values, self._rank.reshape(-1).take(at))

    def _make_room(self, tokens: int, width: int) -> None:
        slots, most, wide = self._ids.shape
        if tokens <= most and width <= wide:
            return
        shape = (slots, most if tokens <= most else max(2 * most, tokens), max(wide, width))
        ids, values = sparse_zeros(shape, np.int32), sparse_zeros(shape, np.float32)
        rank = sparse_zeros(shape[:2], np.int32)
        used = np.flatnonzero(self._table.length > self._table.sent)
        ids[used, :most, :wide], ids[used, :most, wide:] = self._ids[used], -1
        values[used, :most, :wide], values[used, :most, wide:] = self._values[used], -np.inf
        rank[used, :most] = self._rank[used]
        self._ids, self._values, self._rank = ids, values, rank
