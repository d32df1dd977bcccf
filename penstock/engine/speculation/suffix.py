"""Drafts from the own prompt, and from what followed the same contexts in other outputs.

After suffix decoding (Oliaro et al., "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language
Model Inference", 2024): a draft grows token by token and ends where it is no longer likely enough, so
boilerplate gets long drafts, and prose gets short ones or none. In place of trees, whose memory and lookups
are objects, a hash table of contexts of a few sizes holds what followed them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation.context_keys import U64, ContextKeys, KeySpace, OneRowKeys
from penstock.engine.speculation.context_table import (
    CERTAIN,
    CONFIDENCE_SHIFT,
    TOKEN_MASK,
    ContextTable,
)
from penstock.engine.speculation.history_index import MAX_BUCKETS, HistoryIndex
from penstock.engine.speculation.ngram import continuation
from penstock.wire.arrays import I32

SIZES = (2, 4, 8, 16, 32)
"""Tokens of contexts in the table."""
PRIORS = (0.4, 0.59, 0.77, 0.88, 0.95)
"""How often the token that followed a context of each size once followed it again: measured over this
project's docs, and within 0.1 for JSON records (tests/engine/speculation/replay.py)."""
STORE_BYTES = 64 << 20
"""Bytes of the table: 4 Mi contexts, those of 840,000 tokens of output."""
MIN_LIKELY = 0.2
"""Probability that a draft is right up to a token, below which the draft ends before it. Over the
docs, 0.47 of 1.20 drafts are accepted per step at 0.2, 0.43 of 0.87 at 0.3, and 0.41 of 0.75 at 0.4."""
MAX_DRAFTS = 64
MAX_MATCHED = 64
"""Tokens of the own prompt that match, beyond which the next one is as likely."""
MAX_NEW = 16
"""Tokens that a history may have grown by to be learned together with others."""
CHUNK = 1024
"""Tokens learned by one array operation of a history that grew by more. Of a longer growth, the last so many
are learned: a stream's end takes a bounded time."""

_CERTAIN_BITS = np.uint64(16)
_MATCHED = np.arange(MAX_MATCHED + MAX_DRAFTS)
_OWN = np.interp(
    _MATCHED, (0, 2, 3, 4, 5, 6, 8, 12, 24, 32), (0, 0.36, 0.48, 0.55, 0.62, 0.69, 0.77, 0.82, 0.89, 0.97)
)
"""Probability that one more token matches, by the number that do (measured likewise)."""


class SuffixProposer:
    """Proposes what is most likely by the own prompt, or by outputs of the same scope, with the own one.

    Outputs are learned as they grow. Prompts are not: no other stream's drafts come from them.
    """

    def __init__(
        self,
        table: SlotTable,
        *,
        store_bytes: int = STORE_BYTES,
        least_likely: float = MIN_LIKELY,
        most_buckets: int = MAX_BUCKETS,
        seed: int | None = None,
    ) -> None:
        """``seed``: makes drafts reproducible, for tests."""
        self._table = table
        self._history = table.history.reshape(-1)
        self._index = HistoryIndex(table, most_buckets, outputs=False)
        self._space = KeySpace(SIZES, SIZES[-1] + CHUNK + MAX_DRAFTS, seed)
        self._contexts = ContextTable(store_bytes, PRIORS)
        self._least = np.uint64(least_likely * CERTAIN)
        self._own = (_OWN * (CERTAIN - 1)).astype(np.uint64) << CONFIDENCE_SHIFT
        self._own_ints = self._own.tolist()

        self._factors = np.zeros((table.size, len(SIZES)), np.uint64)
        self._learned = np.zeros(table.size, np.int32)
        """Length of the history up to which the output is in the table."""

    def begin(self, slot: int, scope: int = 0) -> None:
        self._index.forget(slot)
        self._factors[slot] = self._space.factors(scope)
        self._learned[slot] = self._table.base[slot]

    def restart(self, slot: int) -> None:
        """Nothing to do: the history is the same."""

    def reset(self) -> None:
        self._contexts.clear()

    def end(self, slot: int) -> None:
        self._learn_one(slot)

    def propose(self, slots: NDArray[np.intp], most: I32) -> I32:
        if len(slots) == 1:
            return self._propose_one(int(slots[0]), int(most[0]))
        length = self._table.length[slots]
        new = length - self._learned[slots]
        if np.count_nonzero(new > MAX_NEW):
            for slot in slots[new > MAX_NEW].tolist():  # mostly streams that were resumed
                self._learn_one(slot)
            new = length - self._learned[slots]
        drafts = min(int(most.max(initial=0)), MAX_DRAFTS)
        keys = self._learn(slots, length, new, drafts)
        at, matched = self._index.find_occurrence(slots, length)
        if not drafts:
            return np.zeros(len(slots), np.int32)
        own = self._own_values(slots, length, at, matched, drafts)
        tokens, counts = self._grow(keys, own, most, drafts)
        ahead = np.arange(len(tokens))
        places = (slots * self._table.max_model_len + length)[:, None] + ahead
        written = ahead < counts[:, None]
        self._history[places[written]] = tokens.T[written]
        return counts

    def _learn(self, slots: NDArray[np.intp], length: I32, new: I32, room: int) -> ContextKeys:
        """Learn the last ``new`` tokens of histories. Returns the keys of contexts at their ends."""
        widest = int(new.max(initial=0))
        window = SIZES[-1] + widest
        back = np.arange(-window, 0)[:, None]
        tokens = self._history.take(slots * self._table.max_model_len + length + back, mode="wrap")
        if np.count_nonzero(length < window):
            tokens[length + back < 0] = -1
        keys = ContextKeys(self._space, tokens, self._factors[slots].T, room)
        if not widest:
            return keys
        learned, tokens = keys.along(SIZES[-1])[:, :-1], tokens[SIZES[-1] :]
        if np.count_nonzero(new != widest):
            among = np.arange(widest)[:, None] >= widest - new
            learned, tokens = learned[:, among], tokens[among]
        self._contexts.learn(learned.reshape(len(SIZES), -1), tokens.reshape(-1).astype(np.uint64))
        self._learned[slots] = length
        return keys

    def _learn_one(self, slot: int) -> None:
        """Learn the output of a slot up to its end."""
        length = self._table.length[slot : slot + 1]
        new = np.minimum(length - self._learned[slot], CHUNK)
        if new[0] > 0:
            self._learn(np.array([slot]), length, new, 0)
        self._learned[slot] = length[0]

    def _grow(self, keys: ContextKeys, own: U64 | None, most: I32, drafts: int) -> tuple[U64, I32]:
        """Draft tokens, uint64[longest, n], and their counts, int32[n]. ``own``: uint64[drafts, n], values of
        the own prompt's continuation."""
        tokens = np.zeros((drafts, len(most)), np.uint64)
        counts = np.zeros(len(most), np.int32)
        certainty = np.full(len(most), CERTAIN, np.uint64)
        agrees = np.ones(len(most), np.bool_)
        """Rows whose draft is the own prompt's continuation so far."""
        for ahead in range(drafts):
            if ahead:
                keys.append(tokens[ahead - 1])
            best = self._contexts.predict(keys.at_end())
            if own is not None:
                best = np.maximum(best, own[ahead] * agrees)
            certainty *= best >> CONFIDENCE_SHIFT
            certainty >>= _CERTAIN_BITS
            goes_on = (certainty >= self._least) & (most > ahead)
            if not np.count_nonzero(goes_on):
                return tokens[:ahead], counts
            counts += goes_on
            tokens[ahead] = best & TOKEN_MASK
            if own is not None:
                agrees &= tokens[ahead] == (own[ahead] & TOKEN_MASK)
        return tokens, counts

    def _propose_one(self, slot: int, most: int) -> I32:
        """The draft of one slot, by integers: array operations would take five times as long."""
        length = int(self._table.length[slot])
        if length - self._learned[slot] > MAX_NEW:
            self._learn_one(slot)
        row = self._table.history[slot]
        window = SIZES[-1] + length - int(self._learned[slot])
        tokens = [-1] * (window - length) + row[max(length - window, 0) : length].tolist()
        keys = OneRowKeys(self._space, tokens, self._factors[slot].tolist())
        for end in range(SIZES[-1], window):
            self._contexts.learn_one(keys.at(end), tokens[end])
        self._learned[slot] = length
        at, matched = self._index.find_one(slot, length)
        agrees = at > 0
        certainty, count = CERTAIN, 0
        while count < min(most, MAX_DRAFTS):
            best = self._contexts.predict_one(keys.at(window + count))
            if agrees:
                own = int(row[at + count])
                best = max(best, self._own_ints[min(matched, MAX_MATCHED - 1) + count] | own)
            certainty = certainty * (best >> 48) >> 16
            if certainty < self._least:
                break
            token = best & 0xFFFFFFFF
            agrees = agrees and token == own
            row[length + count] = token
            keys.append(token)
            count += 1
        return np.full(1, count, np.int32)

    def _own_values(
        self, slots: NDArray[np.intp], length: I32, at: I32, matched: I32, drafts: int
    ) -> U64 | None:
        """uint64[drafts, n], as values of the table: the continuation of the own history where a history
        repeats it. Repeated output is in the table, which knows more than the latest occurrence. None: no
        history repeats its prompt."""
        found = at > 0
        if not np.count_nonzero(found):
            return None
        ahead = np.arange(drafts)
        places = (slots * self._table.max_model_len)[:, None] + continuation(at, length, ahead)
        values = self._history.take(places.T).astype(np.uint64)
        values |= self._own[np.minimum(matched, MAX_MATCHED - 1) + ahead[:, None]]
        values *= found
        return values
