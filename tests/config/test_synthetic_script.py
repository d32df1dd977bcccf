"""The file of --synthetic-script: what it may hold, and what its errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.script_rules import MAX_SCRIPT_BYTES, Call
from penstock.config.serve import ServeConfig
from penstock.config.synthetic_script import parse_script, read_script

WHOLE = """
rules:
- match: {last: tool, text: [a, b], regex: "c+", tool: read, turn: 2, prompt: "^s"}
  times: 1
  reply:
    text: done
    reasoning: hm
    calls:
    - {name: read, arguments: {day: 2026-01-02, n: 1.5, deep: [{a: null}]}}
    - {name: write, arguments: "{not json"}
  pace: {first-token-ms: 5, token-ms: 1.5, tokens-per-step: 3}
  end: error
  after-tokens: 2
  end-times: 4
- reply: {output: "<raw>"}
"""


def test_every_key() -> None:
    first, last = parse_script(WHOLE, "f").rules
    assert (first.match.text, first.match.turn, first.times) == (["a", "b"], 2, 1)
    assert first.reply.calls == [
        Call(name="read", arguments={"day": "2026-01-02", "n": 1.5, "deep": [{"a": None}]}),
        Call(name="write", arguments="{not json"),
    ]
    assert (first.pace.tokens_per_step, first.end, first.after_tokens, first.end_times) == (3, "error", 2, 4)
    assert (last.reply.output, last.end) == ("<raw>", "stop")


def test_characters_that_json_writes_as_pairs_of_escapes() -> None:
    text = '{"rules": [{"reply": {"text": "ok \\ud83d\\ude00", "calls": []}}]}'
    assert parse_script(text, "f").rules[0].reply.text == "ok \U0001f600"
    with pytest.raises(ConfigError, match="f:1: not valid YAML: half of a surrogate pair"):
        parse_script(text.replace("\\ude00", ""), "f")


def test_json_is_yaml() -> None:
    (rule,) = parse_script('{"rules": [{"match": {"text": "a\\u00e9"}, "reply": {"text": "b"}}]}', "f").rules
    assert (rule.match.text, rule.reply.text) == ("aé", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f:1: the file is empty; a script is a mapping with the key rules"),
        ("- a", "f:1: the file is a list, it takes a mapping with the key rules"),
        ("rules: {", "f:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("rule: x", "f:1: rule: no such key; a script takes rules"),
        ("{}", "f:1: the file: the key rules is missing"),
        ("rules: []", "f:1: rules is an empty list, it takes a list of at least one rule"),
        ("rules:\n- match: {last: usr}", "f:2: rules[0].match.last is 'usr', it takes user or tool"),
        (
            "rules:\n- {}\n- match:\n    lst: tool",
            "f:4: rules[1].match.lst: no such key; match takes last, text, regex, tool, turn, prompt",
        ),
        (
            "rules:\n- reply:\n    calls:\n    - nme: 3",
            "f:4: rules[0].reply.calls[0].nme: no such key; a call takes name, arguments",
        ),
        ("rules:\n- reply:\n    calls: [{}]", "f:3: rules[0].reply.calls[0]: the key name is missing"),
        (
            "rules:\n- end: bad",
            "f:2: rules[0].end is 'bad', it takes stop, length, error, stall, exit or hang",
        ),
        (
            "rules:\n- after-tokens: 0",
            "f:2: rules[0].after-tokens is the number 0, it takes an integer of at least 1",
        ),
        (
            "rules:\n- pace: {token-ms: -1}",
            "f:2: rules[0].pace.token-ms is the number -1, it takes a number from 0 to 3600000",
        ),
        (
            "rules:\n- reply: {reasoning: yes}",
            "f:2: rules[0].reply.reasoning is the truth value yes, it takes a text",
        ),
        ("rules:\n- match: {text: 3}", "f:2: rules[0].match.text is the number 3, it takes a text"),
        ("rules:\n- reply: {text: }", "f:2: rules[0].reply.text is empty, it takes a text"),
        ("rules:\n- match: {turn: '3'}", "f:2: rules[0].match.turn is '3', it takes an integer of"),
        (
            "rules:\n- {}\n- match: {text: a}",
            "f:3: rules[1] never answers: rules[0] takes every prompt without a limit of times",
        ),
        (
            "rules:\n- match: {regex: '['}",
            "f:2: rules[0].match.regex is '[', not a regular expression: unterminated character set",
        ),
        (
            "rules:\n- match: {last: user, tool: read}",
            "f:2: rules[0].match.tool is for turns with results of tools, but match.last is user",
        ),
        (
            "rules:\n- reply: {output: a, text: b}",
            "f:2: rules[0].reply.output excludes text, reasoning and calls",
        ),
        ("rules:\n- end-times: 1", "f:2: rules[0].end-times needs an end other than stop"),
        (
            "rules: [{reply: {calls: [{name: a, arguments: {n: .nan}}]}}]",
            "f:1: rules[0].reply.calls[0].arguments cannot be written as JSON",
        ),
        (
            "rules:\n- reply:\n    calls: [{name: a, arguments: {x: {on: b}}}]",
            "f:3: rules[0].reply.calls[0].arguments.x: the key on is no text in YAML, write it in quotes",
        ),
        ("rules:\n- 1: x", "f:2: rules[0]: the key 1 is no text in YAML, write it in quotes"),
        ("1: x", "f:1: the file: the key 1 is no text in YAML, write it in quotes"),
        ("rules:\n- times: 1\n  times: 2", "f:3: rules[0].times is given twice, first in line 2"),
    ],
)
def test_errors_name_line_field_value_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_script(text, "f")
    assert str(raised.value).startswith(message)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"rules: \xff")
    (tmp_path / "long").write_text("#" * (MAX_SCRIPT_BYTES + 1))
    for name, message in (("none", "No such file"), ("latin", "not UTF-8"), ("long", "longer than")):
        with pytest.raises(ConfigError, match=message):
            read_script(str(tmp_path / name))


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_an_engine_that_takes_no_script_is_refused_before_its_model_is_read(engine: str) -> None:
    with pytest.raises(ValueError, match=f"--synthetic-script f: .* synthetic, not {engine}"):
        ServeConfig(engine=engine, synthetic_script="f")  # type: ignore[arg-type]
