"""How each slot is sampled: parameters as columns, and the randomness of a position."""

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
from penstock.engine.sampling.structured_output import GrammarCompiler, GrammarMatchers
from penstock.wire.arrays import I8, I32
from penstock.wire.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""


class SamplingFeature(IntFlag):
    """What a slot's sampling asks for beyond the arg max; a step pays only for what one of its rows needs."""

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
"""What a step needs to know all earlier tokens for."""
TOKEN_LIST_FEATURES = (
    SamplingFeature.BIAS | SamplingFeature.ALLOWED | SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS
)
"""Needs with a list of tokens per slot."""


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """Changes to single logits: ``value`` is added at (row, token)."""

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
        """Length of the history whose tokens the sampler has counted for penalties; -1: nothing yet."""
        self._bias = TokenLists(slots, np.int64, np.float32)
        self._bad_words = TokenLists(slots, np.int32, np.int32)
        """Tokens of the words, and how far each stands before its word's last one (which has 0)."""
        self._ends = TokenLists(slots, np.int64)
        """EOS and stop ids of slots with min_tokens."""
        self._allowed = TokenBitmasks(slots, vocab_size)
        self.prompt_logprobs = PromptLogprobsState(table)
        self.grammars = GrammarMatchers(table, vocab_size, compiler)

    def check(self, sampling: SamplingParams) -> None:
        """Raise RequestRejected for token ids outside the vocabulary and for what this engine lacks."""
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
            back = [len(word) - 1 - place for word in sampling.bad_words for place in range(len(word))]
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
        """The needs of each slot's next token: min_tokens counts only until it is reached."""
        needs = self.needs[slots]
        ahead = self.table.length[slots] + self.table.in_flight_tokens[slots]
        reached = (needs & SamplingFeature.MIN_TOKENS != 0) & (ahead >= self.table.min_end[slots])
        needs[reached] &= ~np.uint16(SamplingFeature.MIN_TOKENS)
        return needs

    def uniforms(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """float64[n] in [0, 1): a function of each slot's seed and next position in its stream alone."""
        ahead = self.table.length[slots] + self.table.in_flight_tokens[slots]
        position = (ahead - self.table.base[slots]).astype(np.uint64)
        return uniform(self.table.seed[slots], position)

    def logit_biases(self, slots: NDArray[np.intp]) -> LogitEdits:
        """logit_bias of the slots that have one."""
        row, (token, value) = self._bias.gather(slots)
        return LogitEdits(row, token, value)

    def banned_tokens(self, slots: NDArray[np.intp]) -> LogitEdits:
        """-inf for the ends of slots below their min_tokens and for what would complete a bad word."""
        early = np.flatnonzero(self.needs_of(slots) & SamplingFeature.MIN_TOKENS)
        row, (token,) = self._ends.gather(slots[early])
        completed_row, completing = self._completing(slots)
        token = np.concatenate((token, completing))
        return LogitEdits(
            np.concatenate((early[row], completed_row)), token, np.full(len(token), -np.inf, np.float32)
        )

    def _completing(self, slots: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and last tokens of the bad words whose other tokens end the slots' output."""
        row, (token, back) = self._bad_words.gather(slots)
        slot, last = slots[row], back == 0
        length = self.table.length[slot]
        place = length - back
        missing = (place < self.table.base[slot]) | (self.table.history[slot, np.maximum(place, 0)] != token)
        missing &= ~last
        word = np.cumsum(last) - last
        found = np.bincount(word, missing, int(last.sum()))[word[last]] == 0
        return row[last][found], token[last][found].astype(np.int64)

    def allowed(self, slots: NDArray[np.intp]) -> NDArray[np.uint8]:
        """uint8[n, ceil(V/8)]: the only tokens the slots may produce; all of them have such a list."""
        return self._allowed.bits[slots]

    # -- grammars

    def ready(self, sampling: SamplingParams) -> bool:
        """Whether a stream may start: its grammar, if it has one, is compiled."""
        return sampling.grammar is None or self.grammars.ready(sampling.grammar)

    def refusal(self, sampling: SamplingParams) -> str | None:
        """Why a stream that is ready cannot start."""
        return None if sampling.grammar is None else self.grammars.error(sampling.grammar)

    def prepare(self, slots: NDArray[np.intp]) -> None:
        """Begin what the sampling of the slots' next tokens needs besides logits."""
        structured = slots[self.needs[slots] & SamplingFeature.GRAMMAR != 0]
        if len(structured):
            self.grammars.prepare(structured)

    def accept(self, slots: NDArray[np.intp], tokens: I32, finish: I8) -> dict[int, str]:
        """Take the sampled tokens of a step. See :meth:`GrammarMatchers.accept`."""
        rows = np.flatnonzero(self.needs[slots] & SamplingFeature.GRAMMAR)
        if not len(rows):
            return {}
        ends = finish[rows]
        broken = self.grammars.accept(slots[rows], tokens[rows], ends)
        finish[rows] = ends
        return broken


class TokenBitmasks:
    """A set of tokens per slot as bits: token t is bit t % 8 of byte t // 8. Memory is committed for the
    slots that have been used."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.bits = np.zeros((slots, packed_size(vocab_size)), np.uint8)

    def set(self, slot: int, tokens: Sequence[int]) -> None:
        """Exactly ``tokens``."""
        ids = np.array(tokens, np.int64)
        self.bits[slot] = 0
        np.bitwise_or.at(self.bits[slot], ids >> 3, (1 << (ids & 7)).astype(np.uint8))


def packed_size(vocab_size: int) -> int:
    """Bytes of a token mask: whole 32-bit words, which is what llguidance writes."""
    return -(-vocab_size // 32) * 4


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform(seed: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.float64]:
    """float64[n] in [0, 1) with 52 random bits, from (seed, position).

    52 and not 53 bits: the product with a float64 total then stays below the total after rounding.
    """
    bits = _mixed(_mixed(seed + _GOLDEN) + position * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
