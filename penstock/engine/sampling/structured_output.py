"""Structured output: the matchers of running streams, and the bitmasks of the tokens that they allow next.

The masks of a step are computed in a thread while the model computes the step's logits; llguidance releases
the GIL. The sampler applies them (:mod:`penstock.engine.torch.sampling.sampler`).
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import FAILED, SlotTable
from penstock.engine.sampling.grammar_compiler import (
    Compilation,
    CompilationState,
    GrammarCompiler,
    failure_reason,
)
from penstock.engine.sampling.mask_filler import MaskFiller, Row
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason

Slots = NDArray[np.intp]

MAX_TEXT_BYTES = 64 << 20
"""Grammar texts of running streams, of which llguidance keeps one per matcher."""
MAX_RUNNING_BYTES = 512 << 20
"""Estimated bytes of the compiled grammars of running streams, each counted once; see
:func:`estimated_bytes`. The cache may have dropped some of them already."""
COMPLETE_STOP_REASONS = ("NoExtension", "NoExtensionBias", "EndOfSentence")
"""llguidance's stop reasons for complete output; all others mean that a limit was exceeded."""


class GrammarMatchers:
    """The grammar matchers of slots, and their token bitmasks."""

    def __init__(self, table: SlotTable, vocab_size: int, compiler: GrammarCompiler | None) -> None:
        """``compiler`` None: structured output is refused."""
        self._table = table
        self._compiler = compiler
        self._masks = np.zeros((table.size, -(-vocab_size // 32)), np.int32)
        """int32[rows, words]: the masks of a step, those of a slot next to each other: bit t % 32 of word
        t // 32 is set if token t may come next. Memory is committed for used rows only."""
        self._first_mask = np.zeros(table.size, np.intp)
        """By slot: the row of the mask of its next token. Those after the tokens of its draft follow."""
        self._matchers: dict[int, LLMatcher] = {}
        self._compilations: dict[int, Compilation] = {}
        self._text_bytes = 0
        """Length of the texts of all matchers."""
        self._users: Counter[Compilation] = Counter()
        """Matchers of each grammar."""
        self._bytes: dict[Compilation, int] = {}
        """Estimated bytes of each of these grammars when its first stream began, and their sum."""
        self._running_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor
        self._filler: MaskFiller
        self._filling: Future[None] | None = None

    # -- streams come and go

    def request(self, server: int, grammar: str) -> Compilation:
        """Have a grammar compiled for a stream; see :meth:`GrammarCompiler.request`. Raises RequestRejected,
        also when this engine has no compiler."""
        if self._compiler is None:
            raise RequestRejected("structured output: the engine has no tokenizer to apply a grammar with")
        return self._compiler.request(server, grammar)

    def withdraw(self, compilation: Compilation) -> None:
        """A stream that asked for it no longer waits."""
        assert self._compiler is not None
        self._compiler.withdraw(compilation)

    def take_finished(self) -> list[Compilation]:
        """Compilations that have finished since the last call."""
        return [] if self._compiler is None else self._compiler.take_finished()

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is compiled, at most ``seconds``."""
        if self._compiler is not None:
            self._compiler.wait(seconds)

    def has_room(self, compilation: Compilation) -> bool:
        """Whether another stream with this grammar may start now."""
        if not self._matchers:
            return True
        if self._text_bytes + len(compilation.grammar) > MAX_TEXT_BYTES:
            return False
        added = 0 if compilation in self._users else compilation.held_bytes
        return self._running_bytes + added <= MAX_RUNNING_BYTES

    def set(self, slot: int, compilation: Compilation) -> None:
        """Give the slot a matcher of a grammar that is compiled, advanced by the output that a resumed stream
        has already."""
        assert compilation.matcher is not None
        matcher = compilation.matcher.deep_copy()
        table = self._table
        matcher.consume_tokens(table.history[slot, table.base[slot] : table.length[slot]].tolist())
        self._matchers[slot] = matcher
        self._compilations[slot] = compilation
        self._text_bytes += len(compilation.grammar)
        if compilation not in self._users:
            self._bytes[compilation] = compilation.held_bytes
            self._running_bytes += compilation.held_bytes
        self._users[compilation] += 1
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-mask")
            self._executor = LLExecutor()
            self._filler = MaskFiller(self._masks, self._executor)

    def clear(self, slot: int) -> None:
        matcher = self._matchers.pop(slot, None)
        if matcher is None:
            return
        compilation = self._compilations.pop(slot)
        assert self._compiler is not None
        self._text_bytes -= len(compilation.grammar)
        compilation.tokens += int(self._table.length[slot] - self._table.base[slot])
        self._users[compilation] -= 1
        if not self._users[compilation]:
            del self._users[compilation]
            self._running_bytes -= self._bytes.pop(compilation)
            self._compiler.on_unused(compilation)
        if compilation.state is CompilationState.EVICTED or compilation.error is not None:
            self._compiler.free_later(matcher)  # it may be the last one of its grammar

    # -- the step

    def prepare(self, slots: Slots, drafts: I32 | None = None) -> None:
        """Start to compute the bitmasks of the slots' next tokens; all slots have a grammar.

        ``drafts`` int32[n]: draft tokens behind each slot's history, which its grammar admits; there is a
        mask for the token after each of them, too. None: there are none.
        """
        assert self._thread is not None
        tokens: list[list[int]]
        if drafts is None:
            first, total, tokens = np.arange(len(slots)), len(slots), [[]] * len(slots)
        else:
            ends = np.cumsum(drafts + 1)
            first, total = ends - drafts - 1, int(ends[-1])
            tokens = [
                self._draft(slot, most) for slot, most in zip(slots.tolist(), drafts.tolist(), strict=True)
            ]
        if total > len(self._masks):
            self._masks = np.zeros((2 * total, self._masks.shape[1]), np.int32)
            self._filler = MaskFiller(self._masks, self._executor)
        self._first_mask[slots] = first
        rows = [
            Row(self._matchers[slot], mask, self._compilations[slot], draft)
            for slot, mask, draft in zip(slots.tolist(), first.tolist(), tokens, strict=True)
        ]
        self._filling = self._thread.submit(self._filler.fill, rows)

    def _draft(self, slot: int, count: int) -> list[int]:
        start = int(self._table.length[slot])
        draft: list[int] = self._table.history[slot, start : start + count].tolist()
        return draft

    def masks(self, slots: Slots, length: I32) -> NDArray[np.uint8]:
        """uint8[n, ceil(V/32) * 4]: the bitmasks that :meth:`prepare` started, of the tokens that follow
        ``length`` int32[n] tokens; token t is bit t % 8 of byte t // 8. Waits for them."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None
        rows = self._first_mask[slots] + length - self._table.length[slots]
        masks: NDArray[np.uint8] = self._masks.view(np.uint8)[rows]
        return masks

    def forced_tokens(self, slot: int) -> list[int]:
        """The tokens that must come next, as far as the slot's grammar leaves no choice."""
        forced: list[int] = self._matchers[slot].compute_ff_tokens()
        return forced

    def count_valid(self, slot: int, tokens: list[int]) -> int:
        """How many of ``tokens`` the slot's grammar admits one after another."""
        return int(self._matchers[slot].validate_tokens(tokens))

    def accept_runs(self, slots: Slots, tokens: I32, count: I32, finish: I8) -> dict[int, str]:
        """:meth:`accept` for ``count`` int32[n] tokens of each slot, one after another in ``tokens``.
        ``finish`` is that of the last one. Cuts ``count`` where a stream ends."""
        first = np.cumsum(count) - count
        broken: dict[int, str] = {}
        offset = 0
        while len(rows := np.flatnonzero(count > offset)):
            ends = np.where(count[rows] == offset + 1, finish[rows], np.int8(FinishReason.NONE))
            broken |= self.accept(slots[rows], tokens[first[rows] + offset], ends)
            ended = ends != FinishReason.NONE
            offset += 1
            finish[rows[ended]], count[rows[ended]] = ends[ended], offset
        return broken

    def accept(self, slots: Slots, tokens: I32, finish: I8) -> dict[int, str]:
        """Advance the slots' grammars by their sampled tokens, and set ``finish`` (int8[n]) of streams whose
        grammar is complete, or FAILED where it exceeded limits.

        Returns an error by slot for those that failed.
        """
        assert self._compiler is not None
        listed = slots.tolist()
        work = [(self._matchers[slot], token) for slot, token in zip(listed, tokens.tolist(), strict=True)]
        consume_token_par(self._executor, work)
        broken: dict[int, str] = {}
        for row, (matcher, token) in enumerate(work):
            if (error := self._compilations[listed[row]].error) is not None:
                broken[listed[row]] = str(error).removeprefix("structured output: ")
                finish[row] = FAILED
                continue
            if not matcher.is_stopped():
                continue
            if matcher.is_error() or matcher.stop_reason() not in COMPLETE_STOP_REASONS:
                broken[listed[row]] = failure_reason(matcher)
                self._compiler.forget(self._compilations[listed[row]])
                finish[row] = FAILED
            elif finish[row] != FinishReason.STOP_TOKEN:
                finish[row] = FinishReason.EOS if token in self._table.eos else FinishReason.GRAMMAR
        return broken
