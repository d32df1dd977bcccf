"""Repetition, presence and frequency penalties, from token counts that are updated as a stream grows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sampling.metadata import NOT_COUNTED, SamplingMetadata
from penstock.engine.torch.sampling.listed_bounds import ListedBounds
from penstock.engine.torch.transfer import to_device, to_device_together
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]

MIN_ROWS, MIN_WIDTH = 16, 64
LISTED_SHARE = 8
"""Up to this part of the vocabulary, penalties are applied to the distinct tokens of a history; beyond, to
the whole vocabulary at once, which takes no longer."""
MAX_ADDED = 64
"""Tokens that are counted one after the other; a history with more of them is counted anew."""
_MOST = (1 << 15) - 1


class TokenCounts:
    """How often each token is in the output of penalised slots, on the model's device.

    ``counts`` is int16[rows, vocabulary]: 0 for a token that is not in the history, otherwise one more than
    its occurrences in the output (1: only in the prompt), at most 32767. ``tokens``, int64[rows, width + 1],
    lists each distinct token of a history once; ``listed``, int64[rows], is their number. Behind them stands
    any token (its count is right, too), and the last column takes what is not to be listed. A slot gets its
    row with its first penalised stream and keeps it.

    The device decides which tokens are new, so that a token may be counted that the host has not read. A
    step adds the tokens since the last one; what it costs is bounded by the distinct tokens.
    """

    @staticmethod
    def most_bytes(slots: int, vocab_size: int) -> int:
        """Bytes on the device when every slot has had a penalised stream with a long history. While the
        tensors grow, the smaller ones exist beside them; a step's activations are larger and gone by then."""
        return slots * (2 * vocab_size + 8 * (vocab_size // LISTED_SHARE + 1) + 8)

    def __init__(self, metadata: SamplingMetadata, last: Tensor | None = None) -> None:
        """``last`` int64[slots], on the device: each slot's last sampled token, for tokens in flight. None:
        there are none."""
        self._metadata = metadata
        self._last = last
        self._row = np.full(metadata.table.size, -1, np.intp)
        """Row of each slot; -1: none."""
        self._rows = 0
        self._most_listed = metadata.vocab_size // LISTED_SHARE
        self._bounds = ListedBounds(metadata.table.size, self._most_listed)
        self._counts = self._tokens = self._listed = torch.zeros(0)

    def free(self) -> None:
        """Free the tensors. Histories are counted anew when they are needed."""
        self._metadata.counted[:] = NOT_COUNTED
        self._row[:] = -1
        self._rows = 0
        self._counts = self._tokens = self._listed = torch.zeros(0)

    def counts_of(self, slots: Slots, length: I32, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """int64[n, W] tokens and int16[n, W] counts of the first ``length`` tokens of the slots' histories;
        or None and int16[n, V], the counts of the whole vocabulary.

        Rows of one slot stand next to each other, their ``length`` ascends. Tokens behind the end of a
        history (drafts) are not kept.
        """
        table = self._metadata.table
        end = table.length[slots] + table.in_flight_tokens[slots]
        behind = length - end
        if not np.count_nonzero(behind):
            return self._gather(*self._advance(slots, end, behind, device))
        is_last = np.ones(len(slots), np.bool_)
        np.not_equal(slots[1:], slots[:-1], out=is_last[:-1])
        owners, depth = slots[is_last], behind[is_last]
        _, width = self._advance(owners, end[is_last], depth, device)
        return self._gather_behind(slots, behind, (owners, depth), width)

    # -- the history

    def _advance(self, slots: Slots, end: I32, depth: I32, device: torch.device) -> tuple[Tensor, int | None]:
        """Count each slot's history up to its ``end``, and make room for ``depth`` int32[n] tokens behind it.
        Returns the slots' rows, int64[n], and how many tokens they list at most; None: too many."""
        counted, bounds = self._metadata.counted, self._bounds
        before = counted[slots]
        left = end - before
        stale = (before < 0) | (left.view(np.uint32) > MAX_ADDED)  # too many, or fewer than were counted
        if np.count_nonzero(stale):
            for slot in slots[stale].tolist():
                self._recount(slot, device)
            before = counted[slots]
            left = end - before
        bounds.grow(slots, left)
        self._make_room(slots, int((bounds.most[slots] + depth).max()), device)
        rows, fewest = to_device(self._row[slots], device), int(left.min())
        for step in range(int(left.max())):
            if step < fewest:
                self._add(rows, self._tokens_at(slots, before + step, device))
            else:
                some = np.flatnonzero(left > step)
                token = self._tokens_at(slots[some], before[some] + step, device)
                self._add(rows[to_device(some, device)], token)
        counted[slots] = end
        bounds.refresh(slots, lambda due: self._listed[to_device(self._row[due], device)])
        most = int((bounds.most[slots] + depth).max())
        return rows, None if most > self._most_listed else most

    def _recount(self, slot: int, device: torch.device) -> None:
        """Count the tokens of a slot's history that are on the host."""
        table, vocab = self._metadata.table, self._metadata.vocab_size
        base, length = int(table.base[slot]), int(table.length[slot])
        counts = np.bincount(table.history[slot, base:length], minlength=vocab)
        known = counts > 0
        known[table.history[slot, :base]] = True
        tokens = np.flatnonzero(known)
        self._make_room(np.array([slot]), len(tokens), device)
        row = int(self._row[slot])
        self._counts[row] = to_device(np.minimum(counts + known, _MOST).astype(np.int16), device)
        self._listed[row] = len(tokens)
        if len(tokens) <= self._most_listed:
            self._tokens[row, : len(tokens)] = to_device(tokens, device)
        self._bounds.restart(slot, len(tokens))
        self._metadata.counted[slot] = length

    def _tokens_at(self, slots: Slots, position: I32, device: torch.device) -> Tensor:
        """int64[n]: the token at one position of each slot's history, the last one perhaps in flight."""
        table = self._metadata.table
        known = table.history[slots, position].astype(np.int64)
        is_unread = position >= table.length[slots]
        if not is_unread.any():
            return to_device(known, device)
        assert self._last is not None
        tokens, senders, unread = to_device_together((known, slots, is_unread), device)
        return torch.where(unread, self._last[senders], tokens)

    def _make_room(self, slots: Slots, wanted: int, device: torch.device) -> None:
        """Rows for ``slots``, and columns for as many as ``wanted`` distinct tokens that are listed."""
        new = slots[self._row[slots] < 0]
        self._row[new] = np.arange(self._rows, self._rows + len(new))
        self._rows += len(new)
        wanted = min(wanted, self._most_listed)
        rows, width = len(self._listed), self._tokens.shape[-1] - 1
        if rows >= self._rows and width >= wanted:
            return
        counts, tokens, listed = self._counts, self._tokens, self._listed
        height = min(_doubled(max(rows, MIN_ROWS), self._rows), len(self._row))
        wider = min(_doubled(max(width, MIN_WIDTH), wanted), self._most_listed)
        new_counts = torch.zeros((height, self._metadata.vocab_size), dtype=torch.int16, device=device)
        new_tokens = torch.zeros((height, wider + 1), dtype=torch.int64, device=device)
        new_listed = torch.zeros(height, dtype=torch.int64, device=device)
        if rows:
            new_counts[:rows], new_listed[:rows] = counts, listed
            new_tokens[:rows, :width] = tokens[:, :width]
        # all or none: there may be no memory for one of them
        self._counts, self._tokens, self._listed = new_counts, new_tokens, new_listed

    # -- tokens behind the history

    def _gather_behind(
        self, slots: Slots, behind: I32, ends: tuple[Slots, I32], width: int | None
    ) -> tuple[Tensor | None, Tensor]:
        """:meth:`counts_of` rows of which some end ``behind`` int32[n] tokens after the history. ``ends``:
        the distinct slots, and the most tokens that a row of each takes from behind.

        One token of each slot after the other is counted as if it were appended, then all are taken back.
        """
        device = self._counts.device
        owners, depth = ends
        order = np.argsort(behind, kind="stable")
        sizes = np.bincount(behind).tolist()
        places = to_device(order, device).split_with_sizes(sizes)
        rows = to_device(self._row[slots[order]], device).split_with_sizes(sizes)
        added = self._tokens_behind(owners, depth)
        columns = self._counts.shape[1] if width is None else width
        tokens = None if width is None else self._tokens.new_empty((len(slots), columns))
        counts = self._counts.new_empty((len(slots), columns))
        taken = []
        for step, (place, row) in enumerate(zip(places, rows, strict=True)):
            if step:
                where, token = added[step - 1]
                taken.append((where, token, self._add(where, token)))
            if len(place):
                listed, counted = self._gather(row, width)
                counts[place] = counted
                if tokens is not None and listed is not None:
                    tokens[place] = listed
        for where, token, before in reversed(taken):
            self._counts[where, token] = before
            self._listed[where] -= (before == 0).long()
        return tokens, counts

    def _tokens_behind(self, slots: Slots, depth: I32) -> list[tuple[Tensor, Tensor]]:
        """Rows and tokens, int64[m]: the first token behind the history of slots that have one, the second
        one, and so on, up to ``depth`` int32[n] of each slot."""
        table, device = self._metadata.table, self._counts.device
        step, owner = (np.arange(int(depth.max()))[:, None] < depth).nonzero()
        sizes = np.bincount(step).tolist()
        slot = slots[owner]
        token = table.history[slot, table.length[slot] + step].astype(np.int64)
        packed = to_device(np.stack((self._row[slot], token)), device)
        row, tokens = packed.unbind()
        return list(zip(row.split_with_sizes(sizes), tokens.split_with_sizes(sizes), strict=True))

    # -- on the device

    def _add(self, row: Tensor, token: Tensor) -> Tensor:
        """Count one token of each row, int64[m], and list it if it is new. Returns int16[m], the counts
        before."""
        before = self._counts[row, token]
        self._counts[row, token] = before.clamp(min=1, max=_MOST - 1) + 1
        is_new, listed, width = before == 0, self._listed[row], self._tokens.shape[1] - 1
        self._tokens[row, torch.where(is_new, listed, width).clamp_(max=width)] = token
        self._listed[row] = listed + is_new
        return before

    def _gather(self, rows: Tensor, width: int | None) -> tuple[Tensor | None, Tensor]:
        """The first ``width`` listed tokens of each row and their counts, or None and all counts."""
        if width is None:
            return None, self._counts.index_select(0, rows)
        listed = self._tokens[:, :width].index_select(0, rows)
        return listed, self._counts.take(listed + rows[:, None] * self._counts.shape[1])


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


def penalize(
    values: Tensor,
    counts: Tensor,
    *,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
) -> None:
    """Apply the penalties to logits, float32[n, W], in place, as vLLM and OpenAI define them.

    ``counts`` int16[n, W] as :class:`TokenCounts` has them, the others float32[n, 1]; None: no row has such a
    penalty. A logit whose count is 0 keeps its value.
    The repetition penalty divides positive logits and multiplies negative ones, for tokens of prompt and
    output; presence and frequency penalties are subtracted, for tokens of the output.
    """
    # PyTorch does not vectorise comparisons and where() on a CPU: 1.4 milliseconds for 64 x 4,096 logits,
    # against 0.05 for an addition, multiplication or clamp.
    if repetition is not None:
        known = counts.clamp(max=1).float()
        factor = (1 - known).addcmul_(known, repetition)
        positive = values.clamp(min=0).div_(factor)
        values.clamp_(max=0).mul_(factor).add_(positive)
    if presence is not None and frequency is not None:
        output = counts.float().sub_(1).clamp_(min=0)
        values.addcmul_(output, frequency, value=-1)
        values.addcmul_(output.clamp_(max=1), presence, value=-1)
