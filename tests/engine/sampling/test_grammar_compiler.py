"""The compiler of grammars: turns, bounds of bytes and time, cancellation, cache. Compilations are fakes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer

from penstock.engine.base import RequestRejected
from penstock.engine.sampling import grammar_compiler
from penstock.engine.sampling.grammar_compiler import (
    COMPILE_TIMEOUT_S,
    EXPIRY_INTERVAL_S,
    MAX_LATE_THREADS,
    MAX_LEXER_BYTES,
    QUEUE_TIMEOUT_S,
    SMALL_GRAMMAR,
    Compilation,
    CompilationState,
    GrammarCompiler,
    estimated_bytes,
)
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.engine.support import Clock

READY_S = 90.0
LARGE = "x" * (SMALL_GRAMMAR + 1)


class FakeCompiler(GrammarCompiler):
    """Compiles a text to a text, when the test lets it."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(8, [1], Path("tokenizer.json"), self.clock, lambda thread: self.clock.now)
        self.order: list[str] = []
        self.gates: dict[str, Event] = {}
        self.begun: dict[str, Event] = {}

    def hold(self, *grammars: str) -> None:
        """Let these compilations go on for ever."""
        for grammar in grammars:
            self.gates[grammar], self.begun[grammar] = Event(), Event()

    def _compile(self, grammar: str) -> Any:
        self.order.append(grammar)
        if grammar in self.gates:
            self.begun[grammar].set()
            assert self.gates[grammar].wait(READY_S)
        if "bad" in grammar:
            return RequestRejected("structured output: bad")
        return f"matcher of {grammar}", np.zeros(4, np.uint8), 0.0

    def begin(self, grammar: str, server: int = 0) -> Compilation:
        """Request a compilation that is held, and wait until it runs."""
        self.hold(grammar)
        compilation = self.request(server, grammar)
        assert self.begun[grammar].wait(READY_S)
        return compilation

    def until(self, *wanted: Compilation) -> None:
        missing = set(wanted)
        while missing:
            self.wait(READY_S)
            missing -= set(self.take_finished())

    def pass_time(self, seconds: float) -> set[Compilation]:
        self.clock.now += seconds + EXPIRY_INTERVAL_S
        return set(self.take_finished())


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    made = FakeCompiler()
    yield made
    for gate in made.gates.values():
        gate.set()


def test_each_text_is_compiled_once(compiler: FakeCompiler) -> None:
    first = compiler.request(0, "a")
    assert compiler.request(1, "a") is first
    compiler.until(first)
    assert compiler.request(0, "a") is first
    assert first.state is CompilationState.DONE
    assert compiler.order == ["a"]


def test_large_grammars_leave_a_thread_to_small_ones(compiler: FakeCompiler) -> None:
    compiler.begin(LARGE)
    waiting = [compiler.request(0, LARGE + str(number)) for number in range(20)]
    compiler.until(compiler.request(0, "small"))
    assert all(large.state is CompilationState.QUEUED for large in waiting)


def test_api_servers_take_turns(compiler: FakeCompiler) -> None:
    compiler.begin(LARGE)
    many = [compiler.request(0, f"{LARGE}-{number}") for number in range(9)]
    one = compiler.request(1, LARGE + "of another")
    compiler.gates[LARGE].set()
    compiler.until(*many, one)
    assert compiler.order.index(one.grammar) <= 2


def test_what_nobody_waits_for_any_longer_is_not_compiled(compiler: FakeCompiler) -> None:
    compiler.begin(LARGE)
    twice = compiler.request(0, LARGE + "twice")
    compiler.request(0, LARGE + "twice")
    never = compiler.request(0, LARGE + "never")
    for withdrawn in (twice, never):
        compiler.withdraw(withdrawn)
    compiler.gates[LARGE].set()
    compiler.until(twice)
    assert compiler.order == [LARGE, LARGE + "twice"]
    again = compiler.request(0, LARGE + "never")
    assert again is not never
    compiler.until(again)


def test_bytes_that_wait_are_bounded_per_api_server(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_QUEUED_BYTES", 3 * len(LARGE))
    compiler.begin(LARGE)
    queued = [compiler.request(0, LARGE + "1"), compiler.request(0, LARGE + "2")]
    with pytest.raises(RequestRejected, match="wait to be compiled") as raised:
        compiler.request(0, LARGE + "3")
    assert raised.value.code == "overloaded"
    compiler.request(1, LARGE + "3")
    compiler.withdraw(queued[0])
    compiler.request(0, LARGE + "4")


def test_a_compilation_beyond_its_time_fails_and_its_thread_is_replaced(compiler: FakeCompiler) -> None:
    late = [LARGE + str(number) for number in range(MAX_LATE_THREADS)]
    for number, grammar in enumerate(late):
        compilation = compiler.begin(grammar)
        assert compiler.pass_time(COMPILE_TIMEOUT_S - 1) == set()
        assert compiler.pass_time(2) == {compilation}
        assert compilation.error is not None
        assert f"more than {COMPILE_TIMEOUT_S:g} s of CPU time" in str(compilation.error)
        assert compilation.error.code == "invalid_request"
        assert compiler.request(0, grammar) is compilation, "it must not take another thread"
        if number + 1 < MAX_LATE_THREADS:
            compiler.until(compiler.request(0, f"{LARGE} after {number}"))
    stuck = compiler.request(0, LARGE + "no thread is left")
    compiler.until(compiler.request(0, "small"))
    assert stuck.state is CompilationState.QUEUED
    compiler.gates[late[0]].set()
    compiler.until(stuck)


def test_a_grammar_that_waits_too_long_fails(compiler: FakeCompiler) -> None:
    compiler.begin(LARGE)
    first = compiler.request(0, LARGE + "1")
    compiler.clock.now += QUEUE_TIMEOUT_S / 2
    later = compiler.request(0, LARGE + "2")
    ended = compiler.pass_time(QUEUE_TIMEOUT_S / 2)
    assert first in ended
    assert first.error is not None
    assert first.error.code == "overloaded"
    assert later not in ended
    assert compiler.request(0, LARGE + "1") is not first, "it may be tried again"


def test_compiled_grammars_are_bounded_in_bytes(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHE_BYTES", 3 * estimated_bytes(sys.getsizeof("g0")))
    made = []
    for number in range(6):
        made.append(compiler.request(0, f"g{number}"))
        compiler.until(made[-1])
        compiler.request(0, "g0")
    compiler.until(compiler.request(0, "one more"))
    states = [compilation.state for compilation in made]
    assert states[0] is CompilationState.DONE, "it was requested again and again"
    assert states.count(CompilationState.DONE) <= 4
    assert all(
        (compilation.matcher is None) == (compilation.state is CompilationState.EVICTED)
        for compilation in made
    )
    again = compiler.request(0, "g1")
    assert again is not made[1]
    compiler.until(again)


def test_what_streams_have_made_a_lexer_grow_to_counts(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHE_BYTES", 3 * MAX_LEXER_BYTES)
    made = [compiler.request(0, f"g{number}") for number in range(6)]
    compiler.until(*made)
    for compilation in made:
        compilation.tokens = 1_000_000
        compiler.on_unused(compilation)
    assert [compilation.state for compilation in made] == [CompilationState.EVICTED] * 4 + [
        CompilationState.DONE
    ] * 2


def test_a_long_bounded_text_is_within_the_lexers_limits() -> None:
    compiler = GrammarCompiler(4096, [2], DEMO_DIR / "tokenizer.json")
    compilation = compiler.request(
        0, LLMatcher.grammar_from_json_schema('{"type": "string", "maxLength": 10000}')
    )
    while compilation.state is not CompilationState.DONE:
        compiler.wait(READY_S)
        compiler.take_finished()
    assert compilation.matcher is not None
    matcher = compilation.matcher.deep_copy()
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    text = '"' + "the quick brown fox jumps over the lazy dog. " * 220
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()


def test_the_lexer_may_take_for_a_token_what_its_library_allows() -> None:
    """With 128,000 tokens a bounded string needs 20 times as many expressions as with 4,096."""
    assert grammar_compiler.LIMITS.step_lexer_fuel >= LLParserLimits().step_lexer_fuel


def test_a_grammar_that_is_not_valid_is_compiled_once(compiler: FakeCompiler) -> None:
    first = compiler.request(0, "bad")
    compiler.until(first)
    assert str(first.error) == "structured output: bad"
    assert compiler.request(0, "bad") is first


DEEP = """
import json, sys, threading
from pathlib import Path
from penstock.engine.sampling.grammar_compiler import CompilationState, GrammarCompiler

threading.stack_size(2 << 20)
links = {f"r{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/r{n + 1}"}}} for n in range(800)}
schema = {"$ref": "#/$defs/r0", "$defs": {**links, "r800": {"type": "string"}}}
compiler = GrammarCompiler(4096, [2], Path(sys.argv[1]))
compilation = compiler.request(0, json.dumps({"grammars": [{"json_schema": schema}]}))
while compilation.state is not CompilationState.DONE:
    compiler.wait(60)
    compiler.take_finished()
print("compiled:", compilation.error)
"""


def test_a_deep_grammar_that_an_api_server_has_checked_does_not_overflow_the_stack() -> None:
    """In a process of its own, whose threads have the stack in which API servers check grammars."""
    tokenizer = Path(__file__).parents[2] / "data" / "tiny_llama" / "tokenizer.json"
    command = [sys.executable, "-c", DEEP, str(tokenizer)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "compiled: None\n"), ended.stderr


def test_the_time_of_a_thread_that_waits_is_not_the_grammars() -> None:
    begun, gate, over = Event(), Event(), Event()

    def work() -> None:
        begun.set()
        gate.wait(READY_S)
        while grammar_compiler.cpu_seconds(thread) < before + 0.05:
            pass
        over.set()
        gate.wait(READY_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(READY_S)
    started = time.monotonic()
    before = grammar_compiler.cpu_seconds(thread)
    assert not over.wait(0.2), "it waits for the gate"
    assert grammar_compiler.cpu_seconds(thread) - before < time.monotonic() - started - 0.1
    gate.set()
    assert over.wait(READY_S)
    thread.join(READY_S)
