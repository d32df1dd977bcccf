"""Ends the reasoning of streams that have used up their budget: which token is forced next, for many slots.

A slot's state is a function of its tokens alone: a stream that another engine resumes goes on with the same
count. It is advanced by array operations, when the next token is sampled, by the tokens appended since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.wire.arrays import I32
from penstock.wire.messages import ThinkingLimit

Slots = NDArray[np.intp]
Marks = tuple[int, ...]
Kind = tuple[tuple[Marks, ...], tuple[Marks, ...], Marks, Marks]
"""Starts, ends, and what is forced the first time and later."""

INSIDE, USED, NEXT, ENDED = range(4)
"""Columns of a state: whether the next token is one of reasoning, tokens of reasoning so far, index of the
token that is forced next (-1: none), and times that reasoning was ended by force."""
FREE = -1
"""In place of a forced token or its index: the token is the model's."""


MIN_SEARCHED = 64
"""Tokens at a prompt's end that are searched for marks first: templates open reasoning there. Then four times
as many, up to all."""


class ThinkingBudgets:
    """The reasoning of the slots' streams. Tokens are those between a start and an end.

    When a stream has as many as its budget, the tokens that end reasoning follow, from the first one that is
    missing. A token that takes the place of a forced one counts, and the end is forced again.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._state = np.zeros((table.size, 4), np.int32)
        self._at = np.zeros(table.size, np.int32)
        """Tokens of the history that the state knows."""
        self._budget = np.zeros(table.size, np.int32)
        self._kind = np.zeros(table.size, np.int32)
        self._kinds: dict[int, Kind] = {}
        self._users: Counter[int] = Counter()
        self._is_last = np.zeros(1, np.bool_)
        """By token: whether it is the last one of a mark; the last entry, False, is that of all beyond."""

    # -- streams come and go

    def set(self, slot: int, thinking: ThinkingLimit) -> None:
        """Limit the reasoning of a slot, whose history is the prompt and output of another engine."""
        kind = thinking.starts, thinking.ends, thinking.forced, thinking.again
        number = next((number for number, known in self._kinds.items() if known == kind), None)
        if number is None:
            number = max(self._kinds, default=-1) + 1
            self._kinds[number] = kind
            lasts = [marks[-1] for known in self._kinds.values() for marks in (*known[0], *known[1])]
            self._is_last = np.zeros(max(lasts) + 2, np.bool_)
            self._is_last[lasts] = True
        self._users[number] += 1
        self._kind[slot], self._budget[slot] = number, thinking.budget
        base = int(self._table.base[slot])
        self._state[slot] = *reasoning_before(self._table.history[slot, :base], thinking), FREE, 0
        self._at[slot] = base
        self._note_limit(self._state[slot : slot + 1], np.array([slot]), self._at[slot : slot + 1])
        self._replay(slot, kind)

    def clear(self, slot: int) -> None:
        number = int(self._kind[slot])
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._kinds[number]

    def _replay(self, slot: int, kind: Kind) -> None:
        """Advance a slot to the end of its history. Between the last tokens of marks it takes no steps."""
        length = int(self._table.length[slot])
        state, one = self._state[slot : slot + 1], np.array([slot])
        lasts = [marks[-1] for marks in (*kind[0], *kind[1])]
        first = int(self._at[slot])
        found = np.flatnonzero(np.isin(self._table.history[slot, first:length], lasts)) + first
        for place in (*found.tolist(), length):
            while self._at[slot] < place:
                if state[0, NEXT] != FREE:
                    self._catch_up(one, int(self._at[slot]) + 1)
                    continue
                count = place - int(self._at[slot])
                if state[0, INSIDE]:
                    count = min(count, int(self._budget[slot] - state[0, USED]))
                    state[0, USED] += count
                self._at[slot] += count
                self._note_limit(state, one, self._at[slot : slot + 1])
            if place < length:
                self._catch_up(one, place + 1)

    # -- the step

    def next_tokens(self, slots: Slots, length: I32) -> NDArray[np.int64]:
        """int64[n]: the forced token that follows ``length`` int32[n] tokens of each slot's history, drafts
        included, or FREE. Tokens that the host has not read yet force nothing: see :meth:`may_force`."""
        self._catch_up(slots)
        behind = length - self._table.length[slots]
        if not np.count_nonzero(behind):
            return self._forced(self._state[slots], slots)
        forced = np.full(len(slots), FREE, np.int64)
        now = behind == 0
        forced[now] = self._forced(self._state[slots[now]], slots[now])
        drafted = np.unique(slots)
        read = self._table.in_flight_tokens[drafted] == 0
        drafted, most = drafted[read], np.zeros(self._table.size, np.int32)
        np.maximum.at(most, slots, behind)
        state, ahead = self._state[drafted], 0
        while len(drafted):
            ahead += 1
            going = most[drafted] >= ahead
            drafted, state = drafted[going], state[going]
            self._step(state, drafted, self._table.length[drafted] + np.int32(ahead))
            rows = np.flatnonzero((behind == ahead) & np.isin(slots, drafted))
            forced[rows] = self._forced(state, drafted)[np.searchsorted(drafted, slots[rows])]
        return forced

    def may_force(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n]: slots where a forced token may follow the tokens that the host has not read yet, but for
        those of :meth:`after_openings`."""
        self._catch_up(slots)
        state = self._state[slots]
        may: NDArray[np.bool_] = state[:, USED] + self._table.in_flight_tokens[slots] >= self._budget[slots]
        may &= state[:, INSIDE] != 0
        may |= state[:, NEXT] != FREE
        return may

    def after_openings(self, slots: Slots) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64[n, S]: tokens that would open reasoning for which nothing is left, if the one that the host
        has not read is among them, or FREE; and int64[n], the token that is forced then."""
        state, length = self._state[slots], self._table.length[slots]
        over = (state[:, INSIDE] == 0) & (state[:, NEXT] == FREE) & (state[:, USED] >= self._budget[slots])
        over &= self._table.in_flight_tokens[slots] > 0
        state[:, NEXT] = np.where(over, 0, FREE)
        widest = max(len(kind[0]) for kind in self._kinds.values())
        openings = np.full((len(slots), widest), FREE, np.int64)
        for number, kind in self._kinds.items():
            for column, marks in enumerate(kind[0]):
                begun = over & (self._kind[slots] == number)
                if len(marks) > 1:
                    newest = self._table.history[slots, length - 1]
                    begun &= self._ends_with(marks[:-1], slots, length, newest)
                openings[begun, column] = marks[-1]
        return openings, self._forced(state, slots)

    def _forced(self, state: I32, slots: Slots) -> NDArray[np.int64]:
        """int64[n]: the token that is forced next, or FREE."""
        forced = np.full(len(slots), FREE, np.int64)
        rows = np.flatnonzero(state[:, NEXT] != FREE)
        for number, kind in self._kinds.items() if len(rows) else ():
            for again, marks in enumerate(kind[2:]):
                of_kind = rows[(self._kind[slots[rows]] == number) & ((state[rows, ENDED] > 0) == again)]
                forced[of_kind] = np.array(marks)[state[of_kind, NEXT]]
        return forced

    def _catch_up(self, slots: Slots, most: int | None = None) -> None:
        """Advance slots to the end of their histories, or to ``most`` tokens."""
        end = self._table.length[slots] if most is None else np.full(len(slots), most, np.int32)
        while np.count_nonzero(behind := self._at[slots] < end):
            slots, end = slots[behind], end[behind]
            state, at = self._state[slots], self._at[slots] + np.int32(1)
            self._step(state, slots, at)
            self._state[slots], self._at[slots] = state, at

    def _step(self, state: I32, slots: Slots, length: I32) -> None:
        """Advance ``state`` int32[n, 4] by the last of ``length`` tokens."""
        token = self._table.history[slots, length - 1]
        forces = np.count_nonzero(state[:, NEXT] != FREE)
        if not forces and not np.count_nonzero(self._is_last.take(token, mode="clip")):
            state[:, USED] += state[:, INSIDE]
            self._note_limit(state, slots, length)
            return
        obeys = (state[:, NEXT] != FREE) & (token == self._forced(state, slots))
        state[:, NEXT] = np.where(obeys, state[:, NEXT] + 1, FREE)
        inside = state[:, INSIDE] != 0
        state[:, USED] += inside & ~obeys
        for number, (starts, ends, forced, again) in self._kinds.items():
            mine = self._kind[slots] == number
            done = mine & (state[:, NEXT] == np.where(state[:, ENDED] > 0, len(again), len(forced)))
            state[done, ENDED] += 1
            state[done, NEXT] = FREE
            left, closed = inside & mine & ~obeys, done
            for marks in ends:
                hit = left & self._ends_with(marks, slots, length, token)
                state[hit, USED] -= len(marks)
                left &= ~hit
                closed |= hit
            inside &= ~closed
            for marks in starts:
                inside |= mine & ~obeys & self._ends_with(marks, slots, length, token)
        state[:, INSIDE] = inside
        self._note_limit(state, slots, length)

    def _note_limit(self, state: I32, slots: Slots, length: I32) -> None:
        """Let an end begin where the budget is used up, after the part of it that is there already."""
        full = (state[:, INSIDE] != 0) & (state[:, NEXT] == FREE) & (state[:, USED] >= self._budget[slots])
        if not np.count_nonzero(full):
            return
        state[full, NEXT] = 0
        for number, kind in self._kinds.items():
            for again, marks in enumerate(kind[2:]):
                rows = np.flatnonzero(full & (self._kind[slots] == number) & ((state[:, ENDED] > 0) == again))
                for size in range(1, len(marks)):
                    at, end = slots[rows], length[rows]
                    part = self._ends_with(marks[:size], at, end, self._table.history[at, end - 1])
                    state[rows[part], NEXT] = size

    def _ends_with(self, marks: Marks, slots: Slots, length: I32, token: I32) -> NDArray[np.bool_]:
        """bool[n]: whether ``marks`` are the last of ``length`` tokens, of which ``token`` is the last."""
        hit: NDArray[np.bool_] = token == marks[-1]
        if len(marks) > 1 and np.count_nonzero(hit):
            for back, mark in enumerate(reversed(marks[:-1]), 2):
                hit &= (length >= back) & (self._table.history[slots, length - back] == mark)
        return hit


def reasoning_before(prompt: I32, limit: ThinkingLimit) -> tuple[bool, int]:
    """Whether an output begins in reasoning, and the tokens of it that the prompt has."""
    if limit.opened is False:
        return False, 0
    size = MIN_SEARCHED
    while True:
        end = prompt[-size:]
        start, close = _last(end, limit.starts), 0 if limit.opened else _last(end, limit.ends)
        if start or close or size >= len(prompt):
            break
        size *= 4
    inside = start > close if limit.opened is None else limit.opened
    return inside, len(end) - start if inside and start else 0


def _last(tokens: I32, sequences: Sequence[Marks]) -> int:
    """Number of ``tokens`` up to the end of the last of ``sequences`` in them; 0: none is there."""
    last = 0
    for marks in sequences:
        first = len(marks) - 1
        hits = np.flatnonzero(tokens[first:] == marks[-1])
        for offset, mark in enumerate(marks[:-1]):
            hits = hits[tokens[hits + offset] == mark]
        last = max(last, int(hits[-1]) + len(marks) if len(hits) else 0)
    return last


def all_marks(thinking: ThinkingLimit) -> set[int]:
    """The token ids that it names."""
    return {
        id for marks in (*thinking.starts, *thinking.ends, thinking.forced, thinking.again) for id in marks
    }
