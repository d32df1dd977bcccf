"""The synthetic engine with a script, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import pre_tokenizers

from penstock.config.script_rules import Pace, PromptMatch
from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.frames import FinishReason
from penstock.wire.scripted import ScriptedRule
from tests.engine.support import Clock, Received, byte_level_tokenizer, submit

EOS = 1
TOKENIZER = byte_level_tokenizer()
TOKENIZER.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    TOKENIZER.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(f'{{"eos_token_id": {EOS}}}')
    return directory


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def chat(*messages: tuple[str, str]) -> list[int]:
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return ids(f"{turns}<|im_start|>assistant\n")


def rule(*outputs: str, verbatim: bool = False, **fields: Any) -> ScriptedRule:
    """``outputs``: the model's own format, then forced ones. ``fields``: of the rule, of its conditions and
    of its pace."""
    conditions = {name: fields.pop(name) for name in PromptMatch.__struct_fields__ if name in fields}
    pace = {name: fields.pop(name) for name in Pace.__struct_fields__ if name in fields}
    return ScriptedRule(
        match=PromptMatch(**conditions),
        pace=Pace(**pace),
        outputs=list(outputs[:1]),
        forced=list(outputs[1:]),
        verbatim=verbatim,
        **fields,
    )


class Bench:
    """An engine whose time passes only in its own sleep. A step takes 10 ms."""

    def __init__(self, model_dir: Path, *rules: ScriptedRule) -> None:
        self.clock = Clock()
        self.engine = SyntheticEngine(
            ServeConfig(engine="synthetic", max_num_seqs=4),
            str(model_dir),
            clock=self.clock,
            sleep=self.clock.sleep,
            script=rules,
        )
        self.received = Received()

    def step(self) -> None:
        self.received.step(self.engine.step())

    def answer(self, prompt: Sequence[int], **request: Any) -> str:
        """The text of a reply, which EOS ends."""
        self.engine.submit(0, submit(1, 200, prompt=prompt, **request))
        while self.engine.has_work():
            self.step()
        tokens = self.received.tokens.pop(1)
        assert (tokens[-1], self.received.finish.pop(1)) == (EOS, FinishReason.EOS)
        text: str = TOKENIZER.decode(tokens[:-1], skip_special_tokens=False)
        return text


# -- which rule answers


def test_the_first_rule_that_matches_answers(model_dir: Path) -> None:
    bench = Bench(
        model_dir,
        rule("tool", tool="read", text="x = 1"),
        rule("any tool", last="tool"),
        rule("both", text=["one", "two"]),
        rule("pattern", regex="(?i)^three"),
        rule("second", turn=2),
        rule("system", prompt="SECRET"),
        rule("else"),
    )
    called = ("assistant", '{"name": "read"}')
    assert bench.answer(chat(("user", "two one"))) == "both"
    assert bench.answer(chat(("user", "Three"))) == "pattern"
    assert bench.answer(chat(("user", "a three"))) == "else"
    assert bench.answer(chat(("user", "one"), called, ("tool", "x = 1"))) == "tool"
    assert bench.answer(chat(("user", "one"), called, ("tool", "x = 2"))) == "any tool"
    identified = ("assistant", 'functions.read:0 {"path": "p"}')  # Kimi's ids
    assert bench.answer(chat(("user", "one"), identified, ("tool", "x = 1"))) == "tool"
    reader = ("assistant", '{"name": "reader"}')
    assert bench.answer(chat(("user", "one"), reader, ("tool", "x = 1"))) == "any tool"
    assert bench.answer(chat(("user", "one"), called, ("user", "a"))) == "second"
    assert bench.answer(chat(("system", "SECRET"), ("user", "a"))) == "system"
    assert bench.answer(ids("one and two")) == "both"


def test_times_counts_the_replies_of_a_conversation(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("first", text="go", times=2), rule("then"))
    turns: list[tuple[str, str]] = []
    replies = []
    for _ in range(4):
        turns.append(("user", "go"))
        replies.append(bench.answer(chat(*turns)))
        turns.append(("assistant", "whatever"))
    assert replies == ["first", "first", "then", "then"]
    assert bench.answer(chat(("user", "go"))) == "first"


def test_logprobs_are_those_of_the_reply(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("a 😀"))
    bench.engine.submit(0, submit(1, 200, prompt=chat(("user", "go")), logprobs=1))
    named: list[int] = []
    while bench.engine.has_work():
        rows = bench.engine.step()
        bench.received.step(rows)
        if rows.logprobs is not None:
            assert (rows.logprobs.ids[:, 0] == rows.logprobs.ids[:, 1]).all()
            named += rows.logprobs.ids[:, 0].tolist()
    assert named == bench.received.tokens[1]


def test_a_prompt_that_no_rule_matches_is_refused(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("a", text="a"))
    with pytest.raises(RequestRejected, match=r"no rule .* turn 1 \(of the user\): 'zzz'"):
        bench.answer(chat(("user", "zzz")))
    with pytest.raises(RequestRejected, match=r"turn 2 \(with results of tools\)"):
        bench.answer(chat(("user", "a"), ("assistant", "b"), ("tool", "c")))
    assert not bench.engine.has_work()


def test_a_grammar_chooses_the_format(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("<tool>{}", '[{"a": 1}]', '{"a": 1}'), rule("raw", verbatim=True))
    schema = LLMatcher.grammar_from_json_schema({"type": "object"})
    prompt = ids("a")
    assert bench.answer(prompt) == "<tool>{}"
    assert bench.answer(prompt, grammar=schema) == '{"a": 1}'
    with pytest.raises(RequestRejected, match=r"rules\[0\] .* do not allow"):
        bench.answer(prompt, grammar=LLMatcher.grammar_from_regex("x"))
    raw = Bench(model_dir, rule("raw", verbatim=True))
    assert raw.answer(prompt, grammar=schema) == "raw"


def test_a_call_that_the_tools_do_not_allow_is_refused(model_dir: Path) -> None:
    """Where text is free, a format of forced calls would be text of the reply."""
    bench = Bench(model_dir, rule("Hi <tool>other", '["other"]', turn=1), rule("text"))
    known = LLMatcher.grammar_from_lark('start: /[^<]*/ ("<tool>known")?')
    with pytest.raises(RequestRejected, match=r"rules\[0\] .* <tool>other', which the request's tools"):
        bench.answer(ids("a"), grammar=known)
    assert bench.answer(chat(("user", "a"), ("assistant", "b"), ("user", "c")), grammar=known) == "text"


def test_sampling_fields_that_shape_a_distribution_are_ignored(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("yes"))
    assert bench.answer(ids("a"), logit_bias={5: 1.0}, bad_words=((5,),), allowed_token_ids=(5,)) == "yes"


# -- when tokens come, and how replies end


def test_pace(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("abcde", first_token_ms=25, token_ms=40, tokens_per_step=2))
    bench.engine.submit(0, submit(1, prompt=ids("x")))
    arrivals = {}
    while bench.engine.has_work():
        at = round(bench.clock() * 1000)
        bench.step()
        arrivals[at] = len(bench.received.tokens.get(1, []))
    times = [at for at, count in arrivals.items() if count > arrivals.get(at - 10, 0)]
    assert [arrivals[at] for at in times] == [2, 4, 6]
    assert [at - times[0] for at in times] == [0, 40, 80]
    assert times[0] - min(arrivals) == 30


def test_a_reply_that_stops_or_is_cut_after_some_tokens(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("abcdef", after_tokens=2))
    assert bench.answer(ids("x")) == "ab"
    bench = Bench(model_dir, rule("abcdef", end="length", after_tokens=3))
    bench.engine.submit(0, submit(1, prompt=ids("x"), interval=5))
    while bench.engine.has_work():
        bench.step()
    assert (bench.received.tokens[1], bench.received.finish[1]) == (ids("abc"), FinishReason.LENGTH)


def test_max_tokens_cuts_a_reply(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("abcdef", tokens_per_step=4))
    bench.engine.submit(0, submit(1, 3, prompt=ids("x")))
    bench.step()
    assert (bench.received.tokens[1], bench.received.finish[1]) == (ids("abc"), FinishReason.LENGTH)
    assert not bench.engine.has_work()


def test_errors_come_after_all_tokens_and_as_often_as_the_rule_says(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("abcdef", end="error", after_tokens=3, end_times=1))
    bench.engine.submit(0, submit(7, prompt=ids("x"), interval=5))
    while bench.engine.has_work():
        bench.step()
    assert bench.received.tokens[7] == ids("abc")
    assert "rules[0]" in bench.received.failed[7].message
    assert bench.answer(ids("x")) == "abcdef"


def test_a_stalled_stream_gives_its_tokens_and_waits_for_its_abort(model_dir: Path) -> None:
    bench = Bench(model_dir, rule("abc", text="x", end="stall"), rule("other"))
    bench.engine.submit(0, submit(3, prompt=ids("x"), interval=100))
    bench.engine.submit(0, submit(4, prompt=ids("y")))
    for _ in range(9):
        bench.step()
    assert bench.received.tokens[3] == ids("abc")
    assert set(bench.received.finish) == {4}
    bench.engine.abort(0, [3])
    bench.step()
    assert bench.received.finish[3] == FinishReason.ABORT
    assert not bench.engine.has_work()


def test_a_resumed_stream_goes_on_and_does_not_end_another_engine(model_dir: Path) -> None:
    prompt, text = ids("x"), "abcdefgh"
    for end in ("stop", "exit", "hang"):
        bench = Bench(model_dir, rule(text, end=end, after_tokens=None if end == "stop" else 3))
        output = ids(text)[:3]
        bench.received.tokens[1] = list(output)
        assert bench.answer([*prompt, *output], resumed=3) == text
