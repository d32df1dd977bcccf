"""Structured output: compiles grammars, and computes the bitmasks of the tokens that they allow next.

Grammars are compiled in threads while their requests wait. The masks of a step are computed in a thread while
the model computes the step's logits; llguidance releases the GIL for both. The sampler applies the masks
(:mod:`penstock.engine.torch.sampler`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import SlotTable
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason

Slots = NDArray[np.intp]

COMPILER_THREADS = 2
"""Compiler threads: more than one, so that a slow grammar does not delay all others."""
MAX_CACHED_GRAMMARS = 1024
"""Compiled grammars kept: more than the waiting streams that a step checks."""
COMPLETE_STOP_REASONS = ("NoExtension", "NoExtensionBias", "EndOfSentence")
"""llguidance's stop reasons for complete output; all others mean that a limit was exceeded."""


class GrammarCompiler:
    """Compiles grammar texts to matchers, each text once."""

    def __init__(self, vocab_size: int, eos: Sequence[int], tokenizer: Path) -> None:
        """``tokenizer``: a tokenizer.json, read when the first grammar is compiled."""
        self._vocab_size = vocab_size
        self._eos = list(eos)
        self._path = tokenizer
        self._threads: ThreadPoolExecutor | None = None
        self._tokenizer: Future[LLTokenizer]
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile_in_background(self, grammar: str) -> bool:
        """Whether compilation has finished, successfully or not; starts it when necessary."""
        found = self._compiled.get(grammar)
        if found is None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(COMPILER_THREADS, "penstock-grammar")
                self._tokenizer = self._threads.submit(self._load)
            self._compiled[grammar] = found = self._threads.submit(self._compile, grammar)
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return found.done()

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher for one stream; the grammar has been compiled without error."""
        return self._compiled[grammar].result().deep_copy()

    def error(self, grammar: str) -> str | None:
        """Why a grammar whose compilation has finished cannot be used; None: it can."""
        error = self._compiled[grammar].exception()
        return None if error is None else f"structured output: {error}"

    def wait(self, seconds: float) -> None:
        """Wait until a grammar that is being compiled is finished, at most ``seconds``."""
        wait([found for found in self._compiled.values() if not found.done()], seconds, FIRST_COMPLETED)

    # -- in threads

    def _load(self) -> LLTokenizer:
        try:
            text = self._path.read_text()
        except OSError as error:
            raise ValueError(f"structured output needs a tokenizer: {error}") from None
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos or None)

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class GrammarMatchers:
    """The grammar matchers of slots, and their token bitmasks."""

    def __init__(self, table: SlotTable, vocab_size: int, compiler: GrammarCompiler | None) -> None:
        """``compiler`` None: structured output is refused."""
        self._table = table
        self._compiler = compiler
        self._masks = np.zeros((table.size, -(-vocab_size // 32)), np.int32)
        """int32[slots, words]: bit t % 32 of word t // 32 is set if token t may come next. Memory is
        committed for used slots only."""
        self._matchers: dict[int, LLMatcher] = {}
        self._filler: ThreadPoolExecutor | None = None
        self._executor: LLExecutor
        self._filling: Future[None] | None = None

    # -- streams come and go

    def check(self, grammar: str) -> None:
        """Start to compile. Raises RequestRejected when this engine has no compiler."""
        if self._compiler is None:
            raise RequestRejected("structured output: the engine has no tokenizer to apply a grammar with")
        self._compiler.compile_in_background(grammar)

    def ready(self, grammar: str) -> bool:
        """Whether a stream with this grammar may start."""
        return self._compiler is not None and self._compiler.compile_in_background(grammar)

    def error(self, grammar: str) -> str | None:
        """Why a stream whose grammar is ready cannot start; None: it can."""
        assert self._compiler is not None
        return self._compiler.error(grammar)

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, at most ``seconds``."""
        if self._compiler is not None:
            self._compiler.wait(seconds)

    def set(self, slot: int, grammar: str) -> None:
        """Give the slot a matcher of a grammar that is ready, advanced by the output that a resumed stream
        has already."""
        assert self._compiler is not None
        matcher = self._compiler.matcher(grammar)
        table = self._table
        matcher.consume_tokens(table.history[slot, table.base[slot] : table.length[slot]].tolist())
        self._matchers[slot] = matcher
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, "penstock-mask")
            self._executor = LLExecutor()

    def clear(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    # -- the step

    def prepare(self, slots: Slots) -> None:
        """Start to compute the bitmasks of the slots' next tokens; all slots have a grammar."""
        assert self._filler is not None
        work = [(self._matchers[slot], slot) for slot in slots.tolist()]
        self._filling = self._filler.submit(fill_next_token_bitmask_par, self._executor, work, self._masks)

    def masks(self, slots: Slots) -> NDArray[np.uint8]:
        """uint8[n, ceil(V/32) * 4]: the bitmasks that :meth:`prepare` started; token t is bit t % 8 of byte
        t // 8. Waits for them."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None
        return self._masks.view(np.uint8)[slots]

    def accept(self, slots: Slots, tokens: I32, finish: I8) -> dict[int, str]:
        """Advance the slots' grammars by their sampled tokens, and set ``finish`` (int8[n]) of streams whose
        grammar is complete.

        Returns an error by slot for streams whose grammar exceeded llguidance's limits.
        """
        work = [
            (self._matchers[slot], token) for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True)
        ]
        consume_token_par(self._executor, work)
        broken: dict[int, str] = {}
        for row, (matcher, token) in enumerate(work):
            if not matcher.is_stopped():
                continue
            if matcher.is_error() or matcher.stop_reason() not in COMPLETE_STOP_REASONS:
                broken[int(slots[row])] = matcher.get_error() or matcher.stop_reason()
            elif finish[row] != FinishReason.STOP_TOKEN:
                finish[row] = FinishReason.EOS if token in self._table.eos else FinishReason.GRAMMAR
        return broken
