"""Sampling parameters of the running streams, as arrays over slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch.prompt_logprobs import PromptLogprobsState
from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.token_lists import TokenLists
from penstock.engine.sampling.rng import uniform
from penstock.engine.sampling.structured_output import GrammarCompiler, GrammarMatchers
from penstock.wire.arrays import I8, I32
from penstock.wire.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by a smaller one overflows float32."""


class SamplingFeature(IntFlag):
    """What a slot's sampling needs beyond the arg max; a step computes only what one of its rows needs."""

    NONE = 0
    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    REPETITION = 16
    OCCURRENCE = 32
    """Presence or frequency penalty."""
    BIAS = 64
    ALLOWED = 128
    BAD_WORDS = 256
    MIN_TOKENS = 512
    LOGPROBS = 1024
    GRAMMAR = 2048


PENALTIES = SamplingFeature.REPETITION | SamplingFeature.OCCURRENCE
READS_HISTORY = PENALTIES | SamplingFeature.BAD_WORDS | SamplingFeature.GRAMMAR
"""Features that need all earlier tokens on the host."""
TOKEN_LIST_FEATURES = (
    SamplingFeature.BIAS | SamplingFeature.ALLOWED | SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS
)
"""Features with a list of tokens per slot."""


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """Changes to single logits: ``value`` is added at (row, token); arrays of equal length."""

    row: NDArray[np.int64]
    token: NDArray[np.int64]
    value: NDArray[np.float32]


class SamplingMetadata:
    """Sampling parameters per slot."""

    def __init__(self, table: SlotTable, vocab_size: int, compiler: GrammarCompiler | None = None) -> None:
        """``compiler`` None: requests with a grammar are refused."""
        slots = table.size
        self.table = table
        self.vocab_size = vocab_size
        self.needs = np.zeros(slots, np.uint16)
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.min_p = np.zeros(slots, np.float32)
        self.repetition = np.ones(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.logprobs = np.full(slots, -1, np.int32)
        self.counted = np.full(slots, -1, np.int32)
        """Length of the history whose tokens the sampler has counted for penalties; -1: none yet."""
        self._bias = TokenLists(slots, np.int64, np.float32)
        self._bad_words = TokenLists(slots, np.int32, np.int32)
        """Tokens of the words, and each token's distance to its word's last token (0 for that one)."""
        self._ends = TokenLists(slots, np.int64)
        """EOS and stop ids of slots with min_tokens."""
        self._allowed = TokenBitmasks(slots, vocab_size)
        self.prompt_logprobs = PromptLogprobsState(table)
        self.grammars = GrammarMatchers(table, vocab_size, compiler)

    def check(self, sampling: SamplingParams) -> None:
        """Raises RequestRejected for token ids outside the vocabulary and for a grammar without tokenizer."""
        self._check_ids("logit_bias", sampling.logit_bias or ())
        if sampling.allowed_token_ids is not None:
            if not sampling.allowed_token_ids:
                raise RequestRejected("allowed_token_ids: must name at least one token")
            self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        for word in sampling.bad_words:
            if not word:
                raise RequestRejected("bad_words: a word without tokens")
            self._check_ids("bad_words", word)
        if sampling.grammar is not None:
            self.grammars.check(sampling.grammar)

    def _check_ids(self, field: str, ids: Any) -> None:
        for token in ids:
            if token >= self.vocab_size:
                raise RequestRejected(f"{field}: token id {token}, but the vocabulary has {self.vocab_size}")

    # -- streams come and go

    def set(self, slot: int, sampling: SamplingParams) -> None:
        needs = SamplingFeature.NONE
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.min_p[slot], self.logprobs[slot] = sampling.min_p, sampling.logprobs
        self.repetition[slot] = sampling.repetition_penalty
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        self.counted[slot] = -1
        self.prompt_logprobs.set(slot, sampling.prompt_logprobs)
        if sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1:
            needs |= SamplingFeature.RANDOM
            needs |= SamplingFeature.TOP_P if sampling.top_p < 1 else SamplingFeature.NONE
            needs |= SamplingFeature.TOP_K if 0 < sampling.top_k < self.vocab_size else SamplingFeature.NONE
            needs |= SamplingFeature.MIN_P if sampling.min_p > 0 else SamplingFeature.NONE
        if sampling.repetition_penalty != 1:
            needs |= SamplingFeature.REPETITION
        if sampling.presence_penalty or sampling.frequency_penalty:
            needs |= SamplingFeature.OCCURRENCE
        if sampling.logprobs >= 0:
            needs |= SamplingFeature.LOGPROBS
        self.needs[slot] = needs | self._set_token_lists(slot, sampling)

    def _set_token_lists(self, slot: int, sampling: SamplingParams) -> SamplingFeature:
        needs = SamplingFeature.NONE
        if sampling.logit_bias:
            self._bias.set(slot, list(sampling.logit_bias), list(sampling.logit_bias.values()))
            needs |= SamplingFeature.BIAS
        if sampling.allowed_token_ids is not None:
            self._allowed.set(slot, sampling.allowed_token_ids)
            needs |= SamplingFeature.ALLOWED
        if sampling.bad_words:
            tokens = [token for word in sampling.bad_words for token in word]
            back = [len(word) - 1 - index for word in sampling.bad_words for index in range(len(word))]
            self._bad_words.set(slot, tokens, back)
            needs |= SamplingFeature.BAD_WORDS
        if sampling.grammar is not None:
            self.grammars.set(slot, sampling.grammar)
            needs |= SamplingFeature.GRAMMAR
        if sampling.min_tokens:
            ends = {*self.table.eos.tolist(), *sampling.stop_token_ids}
            self._ends.set(slot, [token for token in ends if token < self.vocab_size])
            needs |= SamplingFeature.MIN_TOKENS
        return needs

    def clear(self, slot: int) -> None:
        if self.needs[slot] & TOKEN_LIST_FEATURES:
            for lists in (self._bias, self._bad_words, self._ends):
                lists.clear(slot)
        self.grammars.clear(slot)
        self.prompt_logprobs.clear(slot)
        self.needs[slot] = SamplingFeature.NONE

    # -- the step

    def needs_of(self, slots: NDArray[np.intp]) -> NDArray[np.uint16]:
        """uint16[n]: SamplingFeatures of each slot's next token; MIN_TOKENS only until it is reached."""
        needs = self.needs[slots]
        ahead = self.table.length[slots] + self.table.in_flight_tokens[slots]
        reached = (needs & SamplingFeature.MIN_TOKENS != 0) & (ahead >= self.table.min_end[slots])
        needs[reached] &= ~np.uint16(SamplingFeature.MIN_TOKENS)
        return needs

    def uniforms(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """float64[n] in [0, 1): a function of each slot's seed and its stream's next position alone."""
        ahead = self.table.length[slots] + self.table.in_flight_tokens[slots]
        position = (ahead - self.table.base[slots]).astype(np.uint64)
        return uniform(self.table.seed[slots], position)

    def logit_biases(self, slots: NDArray[np.intp]) -> LogitEdits:
        """logit_bias of ``slots``."""
        row, (token, value) = self._bias.gather(slots)
        return LogitEdits(row, token, value)

    def banned_tokens(self, slots: NDArray[np.intp]) -> LogitEdits:
        """-inf for EOS and stop ids of slots below their min_tokens, and for tokens that would complete a bad
        word."""
        early = np.flatnonzero(self.needs_of(slots) & SamplingFeature.MIN_TOKENS)
        row, (token,) = self._ends.gather(slots[early])
        completed_row, completing = self._completing(slots)
        token = np.concatenate((token, completing))
        return LogitEdits(
            np.concatenate((early[row], completed_row)), token, np.full(len(token), -np.inf, np.float32)
        )

    def _completing(self, slots: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and last tokens of the bad words whose other tokens are the end of the slot's output."""
        row, (token, back) = self._bad_words.gather(slots)
        slot, last = slots[row], back == 0
        length = self.table.length[slot]
        position = length - back
        missing = position < self.table.base[slot]
        missing |= self.table.history[slot, np.maximum(position, 0)] != token
        missing &= ~last
        word = np.cumsum(last) - last
        found = np.bincount(word, missing, int(last.sum()))[word[last]] == 0
        return row[last][found], token[last][found].astype(np.int64)

    def allowed(self, slots: NDArray[np.intp]) -> NDArray[np.uint8]:
        """uint8[n, bytes]: bitmask of the allowed_token_ids of slots that have them."""
        return self._allowed.bits[slots]

    # -- grammars

    def ready(self, sampling: SamplingParams) -> bool:
        """Whether a stream may start: its grammar, if any, is compiled."""
        return sampling.grammar is None or self.grammars.ready(sampling.grammar)

    def refusal(self, sampling: SamplingParams) -> str | None:
        """Why a stream that is ready cannot start."""
        return None if sampling.grammar is None else self.grammars.error(sampling.grammar)

    def prepare(self, slots: NDArray[np.intp]) -> None:
        """Begin to compute the grammar masks of the slots' next tokens, while the model computes logits."""
        structured = slots[self.needs[slots] & SamplingFeature.GRAMMAR != 0]
        if len(structured):
            self.grammars.prepare(structured)

    def accept(self, slots: NDArray[np.intp], tokens: I32, finish: I8) -> dict[int, str]:
        """Advance the grammars by the sampled tokens of a step. See :meth:`GrammarMatchers.accept`."""
        rows = np.flatnonzero(self.needs[slots] & SamplingFeature.GRAMMAR)
        if not len(rows):
            return {}
        ends = finish[rows]
        broken = self.grammars.accept(slots[rows], tokens[rows], ends)
        finish[rows] = ends
        return broken


class TokenBitmasks:
    """A set of tokens per slot as a bitmask: token t is bit t % 8 of byte t // 8. Memory is committed for
    used slots only."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.bits = np.zeros((slots, packed_size(vocab_size)), np.uint8)

    def set(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot's set is exactly ``tokens``."""
        ids = np.array(tokens, np.int64)
        self.bits[slot] = 0
        np.bitwise_or.at(self.bits[slot], ids >> 3, (1 << (ids & 7)).astype(np.uint8))


def packed_size(vocab_size: int) -> int:
    """Bytes of a token bitmask: whole 32-bit words, as llguidance writes them."""
    return -(-vocab_size // 32) * 4
