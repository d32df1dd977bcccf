"""Grammars of slots, without a model: what they admit, when they end a stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import FAILED, SlotTable
from penstock.engine.sampling.grammar_compiler import Compilation, CompilationState, GrammarCompiler
from penstock.engine.sampling.structured_output import GrammarMatchers
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams, Submit
from tests.engine.support import byte_level_tokenizer

VOCAB = 320
EOS = 1
READY_S = 60.0


class Bench:
    def __init__(self, directory: Path) -> None:
        self.tokenizer = byte_level_tokenizer("no", "ye", "yes", "ab", "abc")
        self.tokenizer.save(str(directory / "tokenizer.json"))
        self.table = SlotTable(4, 64, [EOS])
        self.compiler = GrammarCompiler(VOCAB, [EOS], directory / "tokenizer.json")
        self.grammars = GrammarMatchers(self.table, VOCAB, self.compiler)

    def compile(self, grammar: str) -> Compilation:
        compilation = self.grammars.request(0, grammar)
        while compilation.state is not CompilationState.DONE:
            self.grammars.wait(READY_S)
            self.grammars.take_finished()
        return compilation

    def add(self, grammar: str, resumed: list[int] | None = None) -> int:
        resumed = resumed or []
        prompt = np.array([5, 6, *resumed], "<i4").tobytes()
        slot = self.table.allocate(
            0, Submit(self.table.running(), prompt, SamplingParams(40, 0), resumed=len(resumed))
        )
        self.grammars.set(slot, self.compile(grammar))
        return slot

    def admitted(self, slot: int) -> set[int]:
        slots = np.array([slot])
        self.grammars.prepare(slots)
        masks = self.grammars.masks(slots, self.table.length[slots])
        return set(np.flatnonzero(np.unpackbits(masks[0], bitorder="little")).tolist())

    def accept(self, slot: int, token: int) -> tuple[int, dict[int, str]]:
        slots, tokens = np.array([slot]), np.array([token], np.int32)
        finish = self.table.append_and_check_stop(slots, tokens)
        broken = self.grammars.accept(slots, tokens, finish)
        return int(finish[0]), broken

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_only_tokens_that_lead_to_a_choice_are_admitted(bench: Bench) -> None:
    slot = bench.add(LLMatcher.grammar_from_lark('start: "yes" | "no"'))
    starts = {bench.tokenizer.token_to_id(text) for text in ("y", "ye", "yes", "n", "no")}
    assert bench.admitted(slot) == starts
    assert bench.accept(slot, bench.tokenizer.token_to_id("ye")) == (FinishReason.NONE, {})
    assert bench.admitted(slot) == set(bench.ids("s"))
    assert bench.accept(slot, *bench.ids("s")) == (FinishReason.GRAMMAR, {})


def test_the_end_is_admitted_only_where_the_grammar_may_end(bench: Bench) -> None:
    slot = bench.add(LLMatcher.grammar_from_regex("a+b?"))
    assert EOS not in bench.admitted(slot)
    assert bench.accept(slot, *bench.ids("a")) == (FinishReason.NONE, {})
    assert EOS in bench.admitted(slot)
    assert bench.accept(slot, EOS) == (FinishReason.EOS, {})


def test_an_end_that_streams_ignore_ends_a_grammar_all_the_same(bench: Bench) -> None:
    slot = bench.add(LLMatcher.grammar_from_regex("a*"))
    bench.table.ignore_eos[slot] = True
    assert bench.accept(slot, EOS) == (FinishReason.EOS, {})


def test_a_resumed_stream_goes_on_within_its_grammar(bench: Bench) -> None:
    slot = bench.add(LLMatcher.grammar_from_regex("abc[xy]"), resumed=bench.ids("abc"))
    assert bench.admitted(slot) == {*bench.ids("x"), *bench.ids("y")}


def test_slots_of_one_grammar_do_not_share_their_state(bench: Bench) -> None:
    grammar = LLMatcher.grammar_from_regex("[xy][uv]")
    first, second = bench.add(grammar), bench.add(grammar, resumed=bench.ids("x"))
    assert bench.admitted(first) == {*bench.ids("x"), *bench.ids("y")}
    assert bench.admitted(second) == {*bench.ids("u"), *bench.ids("v")}


def test_what_the_grammar_does_not_admit_breaks_the_stream(bench: Bench) -> None:
    slot = bench.add(LLMatcher.grammar_from_regex("ab"))
    end, broken = bench.accept(slot, *bench.ids("x"))
    assert end == FAILED
    assert list(broken) == [slot]
    assert broken[slot]


def test_grammars_that_cannot_be_used_say_why(bench: Bench) -> None:
    assert "unclosed" in str(bench.compile(LLMatcher.grammar_from_regex("[a")).error)
    assert bench.compile(LLMatcher.grammar_from_regex("a")).error is None


def test_without_a_tokenizer_every_grammar_is_refused(tmp_path: Path) -> None:
    compiler = GrammarCompiler(VOCAB, [EOS], tmp_path / "tokenizer.json")
    compilation = compiler.request(0, "start: /a/")
    while compilation not in compiler.take_finished():
        compiler.wait(READY_S)
    assert "tokenizer.json" in str(compilation.error)
    with pytest.raises(RequestRejected, match="structured output"):
        GrammarMatchers(SlotTable(1, 8, []), VOCAB, None).request(0, "start: /a/")
