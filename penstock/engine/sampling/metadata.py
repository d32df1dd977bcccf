"""Sampling parameters of the running streams, as arrays over slots."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch.prompt_logprobs import PromptLogprobsState
from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.token_lists import TokenLists
from penstock.engine.batch.token_sets import TokenSets, packed_size, token_bits
from penstock.engine.sampling.bad_words import BadWords
from penstock.engine.sampling.grammar_compiler import Compilation, GrammarCompiler
from penstock.engine.sampling.rng import uniform
from penstock.engine.sampling.structured_output import GrammarMatchers
from penstock.engine.sampling.thinking_budget import ThinkingBudgets, all_marks
from penstock.wire.arrays import I8, I32
from penstock.wire.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by a smaller one overflows float32."""


class SamplingFeature:
    """What a slot's sampling needs beyond the arg max; a step computes only what one of its rows needs.

    Bits, plain integers: with an array an operator of an IntFlag takes 4 us instead of 0.8.
    """

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
    LISTED_LOGPROBS = 4096
    """Logprobs of tokens that the request lists, in place of the likeliest."""
    ROUTED_EXPERTS = 8192
    """The experts of the tokens that are computed; sampling has nothing to do with it."""
    THINKING = 16384
    """Reasoning is limited: at times a token is forced, whatever the logits are."""


PENALTIES = SamplingFeature.REPETITION | SamplingFeature.OCCURRENCE
READS_LAST_TOKEN = SamplingFeature.BAD_WORDS | SamplingFeature.GRAMMAR
"""Features that need the last token on the host."""
EXCLUDING = (
    SamplingFeature.ALLOWED | SamplingFeature.GRAMMAR | SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS
)
"""Features that exclude tokens; several of them may leave none."""
TOKEN_LIST_FEATURES = (
    SamplingFeature.BIAS
    | SamplingFeature.ALLOWED
    | SamplingFeature.BAD_WORDS
    | SamplingFeature.MIN_TOKENS
    | SamplingFeature.LISTED_LOGPROBS
)
"""Features with a list of tokens per slot."""
NO_TOKEN = -1
"""In place of a sampled token: the stream's constraints exclude every token."""
NOT_COUNTED = -1
"""In place of a length: no token of the history is counted for penalties yet."""
LONG_LIST = 256
"""Items of a list of edits from which on it is applied by itself, as one vector for all its rows."""
MIN_PENALTY, MAX_PENALTY = 1e-20, 1e20
"""Repetition penalties are clamped to these: with them logits stay finite in float32."""


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """Changes to single logits: ``value`` is added at (row, token); arrays of equal length."""

    row: NDArray[np.int64]
    token: NDArray[np.int64]
    value: NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class SharedEdits:
    """Changes that several rows share: ``value`` is added at ``token`` (arrays of equal length) in every row
    of ``rows``."""

    rows: NDArray[np.intp]
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
        self.counted = np.full(slots, NOT_COUNTED, np.int32)
        """Length of the history whose tokens the sampler has counted for penalties."""
        self._lists = {
            SamplingFeature.BIAS: TokenLists(slots, np.int64, np.float32),
            SamplingFeature.MIN_TOKENS: TokenLists(slots, np.int64, np.float32),
            SamplingFeature.LISTED_LOGPROBS: TokenLists(slots, np.int64),
        }
        """By feature: tokens and their bias, EOS and stop ids with -inf for each, logprob_token_ids."""
        self._bad_words = BadWords(table)
        self._allowed = TokenSets(slots, vocab_size)
        self._contradiction: tuple[object, object, object, str | None] = None, None, None, None
        """Question and answer of the last :meth:`contradiction`: the choices of a request ask the same."""
        self._checked: dict[str, object] = {}
        """Lists that were checked last, by field: the choices of a request share theirs."""
        self.prompt_logprobs = PromptLogprobsState(table)
        self.grammars = GrammarMatchers(table, vocab_size, compiler)
        self.thinking = ThinkingBudgets(table)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises RequestRejected for token ids outside the vocabulary, empty lists, and a bias that is
        not finite."""
        if self._is_unchecked("logit_bias", sampling.logit_bias):
            self._check_bias(sampling.logit_bias or {})
        if self._is_unchecked("allowed_token_ids", sampling.allowed_token_ids):
            if not sampling.allowed_token_ids:
                raise RequestRejected("allowed_token_ids: must name at least one token")
            self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        if self._is_unchecked("thinking_token_budget", sampling.thinking) and sampling.thinking:
            self._check_ids("thinking_token_budget", all_marks(sampling.thinking))
        if self._is_unchecked("bad_words", sampling.bad_words):
            for word in sampling.bad_words:
                if not word:
                    raise RequestRejected("bad_words: a word without tokens")
                self._check_ids("bad_words", word)
        for field, given in (
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", sampling.bad_words),
            ("thinking_token_budget", sampling.thinking),
        ):
            if given:
                self._checked[field] = given

    def _is_unchecked(self, field: str, given: object) -> bool:
        return given is not None and self._checked.get(field) is not given

    def _check_bias(self, bias: dict[int, float]) -> None:
        self._check_ids("logit_bias", bias)
        for token, value in bias.items():
            if not isfinite(value):
                raise RequestRejected(f"logit_bias: {value} for token id {token}, but must be finite")

    def _check_ids(self, field: str, ids: Collection[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self.vocab_size:
            raise RequestRejected(f"{field}: token id {largest}, but the vocabulary has {self.vocab_size}")

    # -- streams come and go

    def set(self, slot: int, sampling: SamplingParams, compilation: Compilation | None = None) -> None:
        """Give a slot its parameters. ``compilation``: of the grammar, if there is one; it is done."""
        needs = SamplingFeature.NONE
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.min_p[slot], self.logprobs[slot] = sampling.min_p, sampling.logprobs
        self.repetition[slot] = min(max(sampling.repetition_penalty, MIN_PENALTY), MAX_PENALTY)
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        self.counted[slot] = NOT_COUNTED
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
        if sampling.routed_experts:
            needs |= SamplingFeature.ROUTED_EXPERTS
        if sampling.thinking is not None:
            self.thinking.set(slot, sampling.thinking)
            needs |= SamplingFeature.THINKING
        if compilation is not None:
            self.grammars.set(slot, compilation)
            needs |= SamplingFeature.GRAMMAR
        self.needs[slot] = needs | self._set_token_lists(slot, sampling)

    def _set_token_lists(self, slot: int, sampling: SamplingParams) -> int:
        """Keep the lists of a request, once for all its choices."""
        needs = SamplingFeature.NONE
        bias, stop_ids = sampling.logit_bias, sampling.stop_token_ids
        if bias:
            lists = self._lists[SamplingFeature.BIAS]
            if (row := lists.share(slot, bias)) is not None:
                lists.fill(row, list(bias), list(bias.values()))
            needs |= SamplingFeature.BIAS
        if sampling.allowed_token_ids is not None:
            self._allowed.set(slot, sampling.allowed_token_ids)
            needs |= SamplingFeature.ALLOWED
        if sampling.bad_words:
            self._bad_words.set(slot, sampling.bad_words)
            needs |= SamplingFeature.BAD_WORDS
        if sampling.logprob_token_ids:
            lists = self._lists[SamplingFeature.LISTED_LOGPROBS]
            if (row := lists.share(slot, sampling.logprob_token_ids)) is not None:
                lists.fill(row, sampling.logprob_token_ids)
            needs |= SamplingFeature.LISTED_LOGPROBS
        if sampling.min_tokens:
            lists = self._lists[SamplingFeature.MIN_TOKENS]
            if (row := lists.share(slot, stop_ids)) is not None:
                ends = {*self.table.eos.tolist(), *stop_ids}
                known = [token for token in ends if token < self.vocab_size]
                lists.fill(row, known, np.full(len(known), -np.inf))
            needs |= SamplingFeature.MIN_TOKENS
        return needs

    def clear(self, slot: int) -> None:
        if self.needs[slot] & TOKEN_LIST_FEATURES:
            for lists in self._lists.values():
                lists.clear(slot)
            self._bad_words.clear(slot)
            self._allowed.clear(slot)
        if self.needs[slot] & SamplingFeature.THINKING:
            self.thinking.clear(slot)
        self.grammars.clear(slot)
        self.prompt_logprobs.clear(slot)
        self.needs[slot] = SamplingFeature.NONE

    # -- the step: the token that follows a history of ``length`` int32[n] tokens, drafts included

    def needs_of(self, slots: NDArray[np.intp], length: I32) -> NDArray[np.uint16]:
        """uint16[n]: SamplingFeatures of each slot's token; MIN_TOKENS only until it is reached."""
        needs = self.needs[slots]
        reached = (needs & SamplingFeature.MIN_TOKENS != 0) & (length >= self.table.min_end[slots])
        needs[reached] &= ~np.uint16(SamplingFeature.MIN_TOKENS)
        return needs

    def uniforms(self, slots: NDArray[np.intp], length: I32) -> NDArray[np.float64]:
        """float64[n] in [0, 1): a function of each slot's seed and the token's position alone."""
        position = (length - self.table.base[slots]).astype(np.uint64)
        return uniform(self.table.seed[slots], position)

    def edits(
        self, slots: NDArray[np.intp], length: I32, needs: NDArray[np.uint16]
    ) -> Iterator[LogitEdits | SharedEdits]:
        """What is added to the logits of ``slots``: logit_bias, and -inf for EOS and stop ids of slots below
        their min_tokens, and for tokens that would complete a bad word. ``needs``: of :meth:`needs_of`."""
        for feature in (SamplingFeature.BIAS, SamplingFeature.MIN_TOKENS):
            yield from _edits(self._lists[feature], slots, np.flatnonzero(needs & feature))
        rows = np.flatnonzero(needs & SamplingFeature.BAD_WORDS)
        if len(rows):
            row, token = self._bad_words.completing(slots[rows], length[rows])
            yield LogitEdits(rows[row], token, np.full(len(token), -np.inf, np.float32))

    def allowed(self, slots: NDArray[np.intp]) -> NDArray[np.uint8]:
        """uint8[n, bytes]: bitmask of the allowed_token_ids of slots that have them."""
        return self._allowed.bits(slots)

    def listed_logprobs(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """int64[n, W]: the tokens whose logprobs each of ``slots`` lists, in their order, then zeros."""
        return self._lists[SamplingFeature.LISTED_LOGPROBS].grid(slots)

    def reads_history(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """bool[n]: slots whose next token cannot be sampled before the host has read the last one."""
        needs = self.needs[slots]
        reads: NDArray[np.bool_] = needs & READS_LAST_TOKEN != 0
        rows = np.flatnonzero(needs & SamplingFeature.THINKING)
        if len(rows):
            reads[rows] |= self.thinking.may_force(slots[rows])
        return reads

    def forced_tokens(self, slots: NDArray[np.intp], length: I32) -> NDArray[np.int64]:
        """int64[n]: the token that ends the reasoning of each of some slots that limit it, where one is due
        and the slot's grammar admits it; otherwise NO_TOKEN."""
        forced = self.thinking.next_tokens(slots, length)
        rows = np.flatnonzero((forced != NO_TOKEN) & (self.needs[slots] & SamplingFeature.GRAMMAR != 0))
        if len(rows):
            tokens = forced[rows]
            masks = self.grammars.masks(slots[rows], length[rows])
            admitted = masks[np.arange(len(rows)), tokens >> 3] >> (tokens & 7).astype(np.uint8) & 1
            forced[rows[admitted == 0]] = NO_TOKEN
        return forced

    # -- grammars

    def contradiction(self, sampling: SamplingParams, compilation: Compilation) -> str | None:
        """Why no token can come first under a compiled grammar and the request's other constraints."""
        allowed, bad_words = sampling.allowed_token_ids, sampling.bad_words
        if (allowed is None and not bad_words) or compilation.first_tokens is None:
            return None
        *asked, answer = self._contradiction
        if asked[0] is not allowed or asked[1] is not bad_words or asked[2] is not compilation:
            possible = compilation.first_tokens[: packed_size(self.vocab_size)].copy()
            if allowed is not None:
                possible &= token_bits(allowed, self.vocab_size)
            possible &= ~token_bits([word[0] for word in bad_words if len(word) == 1], self.vocab_size)
            answer = None if possible.any() else _contradiction(sampling)
            self._contradiction = allowed, bad_words, compilation, answer
        return answer

    def prepare(self, slots: NDArray[np.intp], drafts: I32 | None) -> None:
        """Begin to compute the grammar masks of the slots' next tokens, while the model computes logits.
        ``drafts``: see :meth:`GrammarMatchers.prepare`."""
        structured = (self.needs[slots] & SamplingFeature.GRAMMAR).nonzero()[0]
        if len(structured):
            self.grammars.prepare(slots[structured], None if drafts is None else drafts[structured])

    def accept(self, slots: NDArray[np.intp], tokens: I32, finish: I8) -> dict[int, str]:
        """Advance the grammars by the sampled tokens of a step. See :meth:`GrammarMatchers.accept`."""
        rows = (self.needs[slots] & SamplingFeature.GRAMMAR).nonzero()[0]
        if not len(rows):
            return {}
        ends = finish[rows]
        broken = self.grammars.accept(slots[rows], tokens[rows], ends)
        finish[rows] = ends
        return broken

    def accept_runs(self, slots: NDArray[np.intp], tokens: I32, count: I32, finish: I8) -> dict[int, str]:
        """Advance the grammars by several tokens each. See :meth:`GrammarMatchers.accept_runs`."""
        rows = (self.needs[slots] & SamplingFeature.GRAMMAR).nonzero()[0]
        if not len(rows):
            return {}
        structured = np.zeros(len(slots), np.bool_)
        structured[rows] = True
        ends, counts = finish[rows], count[rows]
        broken = self.grammars.accept_runs(slots[rows], tokens[np.repeat(structured, count)], counts, ends)
        finish[rows], count[rows] = ends, counts
        return broken


def _contradiction(sampling: SamplingParams) -> str:
    fields = [] if sampling.allowed_token_ids is None else ["allowed_token_ids"]
    fields += ["bad_words"] if sampling.bad_words else []
    return (
        f"structured output (response_format, structured_outputs) and {' and '.join(fields)} contradict each "
        "other: together they allow no token at the start"
    )


def _edits(
    lists: TokenLists, slots: NDArray[np.intp], rows: NDArray[np.intp]
) -> Iterator[LogitEdits | SharedEdits]:
    """The edits of ``slots[rows]``: short lists all at once, a long one for all its rows."""
    if not len(rows):
        return
    is_long = lists.counts(slots[rows]) >= LONG_LIST
    if is_long.any():
        for some, (token, value) in lists.each(slots[rows[is_long]]):
            yield SharedEdits(rows[is_long][some], token, value)
        rows = rows[~is_long]
    row, (token, value) = lists.gather(slots[rows])
    yield LogitEdits(rows[row], token, value)
