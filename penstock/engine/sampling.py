"""How each slot is sampled: parameters as columns, and the randomness of a position."""

from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..wire.messages import Sampling
from .base import RequestRejected
from .slots import SlotTable

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""


class Need(IntFlag):
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


@dataclass(slots=True, frozen=True)
class Edits:
    """Changes to single logits: ``value`` is added at (row, token)."""

    row: NDArray[np.int64]
    token: NDArray[np.int64]
    value: NDArray[np.float32]


class SamplingColumns:
    """Sampling parameters per slot. Lists of varying length are kept apart, by slot."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
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
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._allowed: dict[int, NDArray[np.int64]] = {}
        self._bad_words: dict[int, list[NDArray[np.int32]]] = {}
        self._ends: dict[int, NDArray[np.int64]] = {}
        """EOS and stop ids of slots with min_tokens."""

    def check(self, sampling: Sampling) -> None:
        """Raise RequestRejected for token ids outside the vocabulary and for what this engine lacks."""
        if sampling.prompt_logprobs >= 0:
            raise RequestRejected("prompt_logprobs: not supported by this engine")
        self._check_ids("logit_bias", sampling.logit_bias or ())
        if sampling.allowed_token_ids is not None:
            if not sampling.allowed_token_ids:
                raise RequestRejected("allowed_token_ids: must name at least one token")
            self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        for word in sampling.bad_words:
            if not word:
                raise RequestRejected("bad_words: a word without tokens")
            self._check_ids("bad_words", word)

    def _check_ids(self, field: str, ids: Any) -> None:
        for token in ids:
            if token >= self.vocab_size:
                raise RequestRejected(f"{field}: token id {token}, but the vocabulary has {self.vocab_size}")

    # -- streams come and go

    def set(self, slot: int, sampling: Sampling) -> None:
        needs = Need.NONE
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.min_p[slot], self.logprobs[slot] = sampling.min_p, sampling.logprobs
        self.repetition[slot] = sampling.repetition_penalty
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        if sampling.temperature >= GREEDY_BELOW:
            needs |= Need.RANDOM
            needs |= Need.TOP_P if sampling.top_p < 1 else Need.NONE
            needs |= Need.TOP_K if 0 < sampling.top_k < self.vocab_size else Need.NONE
            needs |= Need.MIN_P if sampling.min_p > 0 else Need.NONE
        if sampling.repetition_penalty != 1:
            needs |= Need.REPETITION
        if sampling.presence_penalty or sampling.frequency_penalty:
            needs |= Need.OCCURRENCE
        if sampling.logprobs >= 0:
            needs |= Need.LOGPROBS
        self.needs[slot] = needs | self._set_token_lists(slot, sampling)

    def _set_token_lists(self, slot: int, sampling: Sampling) -> Need:
        needs = Need.NONE
        if sampling.logit_bias:
            tokens = np.fromiter(sampling.logit_bias, np.int64)
            self._bias[slot] = tokens, np.fromiter(sampling.logit_bias.values(), np.float32)
            needs |= Need.BIAS
        if sampling.allowed_token_ids is not None:
            self._allowed[slot] = np.array(sampling.allowed_token_ids, np.int64)
            needs |= Need.ALLOWED
        if sampling.bad_words:
            self._bad_words[slot] = [np.array(word, np.int32) for word in sampling.bad_words]
            needs |= Need.BAD_WORDS
        if sampling.min_tokens:
            ends = np.concatenate((self.table.eos, np.array(sampling.stop_token_ids, np.int64)))
            self._ends[slot] = ends[np.less(ends, self.vocab_size)].astype(np.int64)
            needs |= Need.MIN_TOKENS
        return needs

    def clear(self, slot: int) -> None:
        if self.needs[slot] & (Need.BIAS | Need.ALLOWED | Need.BAD_WORDS | Need.MIN_TOKENS):
            for lists in (self._bias, self._allowed, self._bad_words, self._ends):
                lists.pop(slot, None)
        self.needs[slot] = Need.NONE

    # -- the step

    def needs_of(self, slots: NDArray[np.intp]) -> NDArray[np.uint16]:
        """The needs of each slot's next token: min_tokens counts only until it is reached."""
        needs = self.needs[slots]
        reached = (needs & Need.MIN_TOKENS != 0) & (self.table.length[slots] >= self.table.min_end[slots])
        needs[reached] &= ~np.uint16(Need.MIN_TOKENS)
        return needs

    def uniforms(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """float64[n] in [0, 1): a function of each slot's seed and next position in its stream alone."""
        position = (self.table.length[slots] - self.table.base[slots]).astype(np.uint64)
        return uniform(self.table.seed[slots], position)

    def biases(self, slots: NDArray[np.intp]) -> Edits:
        """logit_bias of the slots, which all have one."""
        return _edits([self._bias[slot] for slot in slots.tolist()])

    def bans(self, slots: NDArray[np.intp]) -> Edits:
        """-inf for the ends of slots below their min_tokens and for what would complete a bad word."""
        needs = self.needs_of(slots)
        lists = []
        for slot, need in zip(slots.tolist(), needs.tolist(), strict=True):
            banned = self._ends[slot] if need & Need.MIN_TOKENS else np.zeros(0, np.int64)
            if need & Need.BAD_WORDS:
                banned = np.concatenate((banned, self._completing(slot)))
            lists.append((banned, np.full(len(banned), -np.inf, np.float32)))
        return _edits(lists)

    def _completing(self, slot: int) -> NDArray[np.int64]:
        """Last tokens of the bad words whose other tokens end the slot's output."""
        output = self.table.history[slot, self.table.base[slot] : self.table.length[slot]]
        return np.array(
            [
                word[-1]
                for word in self._bad_words[slot]
                if len(word) == 1 or np.array_equal(output[-(len(word) - 1) :], word[:-1])
            ],
            np.int64,
        )

    def allowed(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """bool[n, vocab]: the only tokens the slots may produce; all of them have such a list."""
        mask = np.zeros((len(slots), self.vocab_size), np.bool_)
        for row, slot in enumerate(slots.tolist()):
            mask[row, self._allowed[slot]] = True
        return mask


def _edits(lists: list[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> Edits:
    row = np.repeat(np.arange(len(lists)), [len(tokens) for tokens, _ in lists])
    return Edits(
        row, np.concatenate([tokens for tokens, _ in lists]), np.concatenate([values for _, values in lists])
    )


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
