"""Structured output of a random model: what it says always matches, and nobody else notices."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from penstock.engine.sampling import grammar_compiler, structured_output
from penstock.engine.sampling.grammar_compiler import GrammarCompiler
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Submit
from tests.engine.support import byte_level_tokenizer
from tests.engine.torch.harness import Driver, Outcome, assert_alike, make_engine, make_model, run_all, submit

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 2},
    },
    "required": ["ok", "n", "kind", "tags"],
    "additionalProperties": False,
}
OBJECT = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
REGEX = r"[a-f]{3}-[0-9]{2,4}"
DATE = LLMatcher.grammar_from_regex(REGEX)
CHOICE = LLMatcher.grammar_from_lark('start: "yes" | "no" | "maybe"')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model("llama", directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    made = byte_level_tokenizer("tr", "tru", "true", "fa", "no", "ye", "yes", "ab", "abc", "00")
    made.save(str(model / "tokenizer.json"))
    return made


def mixed(count: int, **sampling: Any) -> list[Submit]:
    """Streams with and without grammars, in turn."""
    kinds: list[dict[str, Any]] = [{}, {"grammar": OBJECT}, {}, {"grammar": DATE}, {"grammar": CHOICE}]
    return [
        submit(stream, [4 + stream, 7, 9], **({"max_tokens": 120} | kinds[stream % 5] | sampling))
        for stream in range(count)
    ]


def check_texts(outcomes: dict[int, Outcome], tokenizer: Tokenizer) -> None:
    for stream, outcome in outcomes.items():
        text = tokenizer.decode(outcome.tokens)
        if stream % 5 == 1:
            value = json.loads(text)
            assert list(value) == ["ok", "n", "kind", "tags"]
            assert isinstance(value["ok"], bool)
            assert 0 <= value["n"] <= 99
            assert value["kind"] in ("red", "green")
            assert all(re.fullmatch("[a-c]{1,3}", tag) for tag in value["tags"])
        elif stream % 5 == 3:
            assert re.fullmatch(REGEX, text)
        elif stream % 5 == 4:
            assert text in ("yes", "no", "maybe")
        if stream % 5 not in (0, 2):
            assert outcome.finish in (FinishReason.GRAMMAR, FinishReason.EOS)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_always_matches_and_others_do_not_notice(
    model: Path, tokenizer: Tokenizer, temperature: float
) -> None:
    requests = mixed(30, temperature=temperature)
    together = run_all(make_engine(model), requests)
    check_texts(together, tokenizer)
    free = [request for request in requests if request.sampling.grammar is None]
    alone = run_all(make_engine(model), free)
    assert_alike(
        {stream: outcome.tokens for stream, outcome in alone.items()},
        {request.stream: together[request.stream].tokens for request in free},
    )


def test_preempted_streams_go_on_within_their_grammars(model: Path, tokenizer: Tokenizer) -> None:
    requests = mixed(15, temperature=0.8)
    plenty = run_all(make_engine(model), requests)
    engine = make_engine(model, kv_cache_memory=20 * 16 * 2 * 2 * 2 * 8 * 4)  # 20 blocks of 16 tokens
    scarce = run_all(engine, requests)
    assert engine.metrics()["preemptions_total"] > 0
    assert {stream: outcome.tokens for stream, outcome in scarce.items()} == {
        stream: outcome.tokens for stream, outcome in plenty.items()
    }
    check_texts(scarce, tokenizer)


def test_a_stream_resumed_in_the_middle_ends_as_it_would_have(model: Path, tokenizer: Tokenizer) -> None:
    setting: dict[str, Any] = {"grammar": OBJECT, "temperature": 1.0, "seed": 5, "max_tokens": 120}
    whole = run_all(make_engine(model), [submit(0, [4, 5], **setting)])[0].tokens
    half = len(whole) // 2
    rest = run_all(make_engine(model), [submit(0, [4, 5, *whole[:half]], resumed=half, **setting)])[0]
    assert rest.tokens == whole[half:]
    assert rest.finish is FinishReason.GRAMMAR


def test_a_grammar_that_cannot_be_compiled_fails_its_stream_alone(model: Path, tokenizer: Tokenizer) -> None:
    engine = make_engine(model)
    driver = Driver(engine)
    driver.submit(submit(0, [4, 5], max_tokens=4))
    driver.submit(submit(1, [4, 5], grammar=LLMatcher.grammar_from_regex("[a")))
    failed = []
    while engine.has_work():
        failed += engine.step().failed
    assert [(failure.stream, failure.code) for failure in failed] == [(1, "invalid_request")]
    assert "unclosed" in failed[0].message
    assert engine.load().running == engine.load().waiting == 0


def test_a_stream_beyond_the_limits_of_its_grammar_fails_after_its_tokens(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    driver = Driver(engine)
    driver.submit(submit(0, [4, 5], grammar=DATE, interval=50))
    while not driver.outcomes[0].tokens:
        driver.step()
    matcher = engine._sampling.grammars._matchers[engine._table.find_slot(0, 0) or 0]
    matcher.consume_token(2)  # what no mask admits: the matcher is broken
    rows = engine.step()
    assert [(failure.stream, failure.position, failure.code) for failure in rows.failed] == [
        (0, 2, "invalid_request")
    ]
    assert rows.tokens.size == 1
    assert not engine.has_work()


def test_a_grammar_that_breaks_on_the_last_token_ends_its_stream_once(
    model: Path, tokenizer: Tokenizer
) -> None:
    engine = make_engine(model)
    driver = Driver(engine)
    driver.submit(submit(0, [4, 5], grammar=DATE, max_tokens=2, interval=50))
    while not driver.outcomes[0].tokens:
        driver.step()
    engine._sampling.grammars._matchers[engine._table.find_slot(0, 0) or 0].consume_token(2)
    rows = engine.step()
    assert [failure.stream for failure in rows.failed] == [0]
    assert rows.finish is None or not rows.finish.any()
    assert not engine.has_work()


@pytest.mark.parametrize(
    "text", ["start: a\na: a", json.dumps({"grammars": [{"json_schema": {"$ref": "#"}}]})]
)
def test_a_grammar_that_matches_nothing_is_refused(model: Path, tokenizer: Tokenizer, text: str) -> None:
    engine = make_engine(model)
    Driver(engine).submit(submit(0, [4, 5], grammar=text, max_tokens=1))
    failed, rows = [], 0
    while engine.has_work():
        step = engine.step()
        failed += step.failed
        rows += len(step.stream)
    assert [(failure.code, failure.position) for failure in failed] == [("invalid_request", 0)]
    assert "matches no text" in failed[0].message
    assert not rows


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", ["on", "off"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_without_any_allowed_token_end_with_stop(
    model: Path, tokenizer: Tokenizer, temperature: float, ahead: str
) -> None:
    letter = tokenizer.token_to_id("a")
    settings: list[dict[str, Any]] = [
        {"grammar": LLMatcher.grammar_from_regex("[ab][cd]"), "allowed_token_ids": (letter,)},
        {"allowed_token_ids": (letter,), "bad_words": ((letter, letter),)},
        {"allowed_token_ids": (letter,), "bad_words": ((letter, letter),), "logprobs": 2, "interval": 9},
        {"allowed_token_ids": (1,), "min_tokens": 3},
        {},
    ]
    requests = [
        submit(stream, [4, 5], **({"max_tokens": 12, "temperature": temperature} | setting))
        for stream, setting in enumerate(settings)
    ]
    outcomes = run_all(make_engine(model, async_scheduling=ahead), requests)
    assert [outcomes[stream].tokens for stream in range(4)] == [[letter]] * 3 + [[]]
    assert all(outcomes[stream].finish is FinishReason.GRAMMAR for stream in range(4))
    assert len(outcomes[2].logprobs) == 1
    assert outcomes[4].tokens == run_all(make_engine(model), [requests[4]])[4].tokens


def test_grammars_that_are_compiled_are_in_nobodys_way(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()
    compile = GrammarCompiler._compile

    def wait(self: GrammarCompiler, grammar: str) -> Any:
        assert gate.wait(60)
        return compile(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait)
    engine = make_engine(model)
    driver = Driver(engine)
    for stream in range(500):
        driver.submit(
            submit(stream, [4, 5], max_tokens=3, grammar=LLMatcher.grammar_from_regex(f"a{stream}"))
        )
    driver.submit(submit(500, [4, 5], max_tokens=3))
    for _ in range(8):
        driver.step()
    assert driver.outcomes[500].finish is not None
    engine.abort(0, range(400))
    driver.step()
    assert engine.load().waiting == 100
    gate.set()
    driver.run()
    assert all(driver.outcomes[stream].tokens for stream in range(400, 500))
    engine.drop_server(0)


def test_a_grammar_is_compiled_again_when_the_cache_has_dropped_it(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHE_BYTES", 1)
    engine = make_engine(model, max_num_seqs=2)
    requests = [
        submit(stream, [4, 5], max_tokens=9, grammar=LLMatcher.grammar_from_regex(f"[ab]{stream % 7}"))
        for stream in range(30)
    ]
    for stream, outcome in run_all(engine, requests).items():
        assert tokenizer.decode(outcome.tokens) in (f"a{stream % 7}", f"b{stream % 7}")


def test_grammars_run_together_as_far_as_their_memory_allows(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of one grammar count once; another grammar waits, and others that need none do not."""
    engine = make_engine(model, max_num_seqs=8)
    driver = Driver(engine)
    grammars = [LLMatcher.grammar_from_regex(f"{letter}{{100}}") for letter in "abc"]
    room = 2 * grammar_compiler.estimated_bytes(sys.getsizeof(grammars[0]))
    monkeypatch.setattr(structured_output, "MAX_RUNNING_BYTES", room)
    monkeypatch.setattr(grammar_compiler, "BYTES_PER_MASK_S", 0)
    for stream in range(6):
        driver.submit(submit(stream, [4, 5], max_tokens=120, grammar=grammars[stream % 3]))
    driver.submit(submit(9, [4, 5], max_tokens=200, ignore_eos=True))
    most = 0
    while not all(driver.outcomes[stream].finish for stream in range(6)):
        driver.step()
        most = max(most, engine.load().running)
    assert most == 5, "two streams of each of two grammars, and the one without"
    for stream in range(6):
        assert tokenizer.decode(driver.outcomes[stream].tokens) == "abc"[stream % 3] * 100
