from __future__ import annotations

import re

import pytest

from penstock.cli import chat, complete, serve
from penstock.cli.parser import build, help_text, parse
from penstock.config.errors import ConfigError
from penstock.config.introspect import options_of
from penstock.config.serve import ServeConfig


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("", {}),
        ("./llama", {"model": "./llama"}),
        ("--port 1", {"port": "1"}),
        ("--port=1", {"port": "1"}),
        ("--port 1 --port 2", {"port": "2"}),
        ("--max_num_seqs 4", {"max_num_seqs": "4"}),
        ("--max_num_seqs=a_b", {"max_num_seqs": "a_b"}),
        ("--strict-requests", {"strict_requests": "true"}),
        ("--no_strict_requests", {"strict_requests": "false"}),
        ("--strict-requests --no-strict-requests", {"strict_requests": "false"}),
        ("m --served-model-name a b", {"model": "m", "served_model_name": ["a", "b"]}),
        ("--served-model-name a b -- m", {"model": "m", "served_model_name": ["a", "b"]}),
        ("--api-key a --api-key b c", {"api_key": ["a", "b", "c"]}),
        ("--seed -1", {"seed": "-1"}),
        ("m -- --a_b 1 -x", {"model": "m", "engine_args": ["--a_b", "1", "-x"]}),
        ("-- --a_b", {"engine_args": ["--a_b"]}),
        ("m --", {"model": "m"}),
        ("m --async-scheduling", {"model": "m", "async_scheduling": "on"}),
        ("--async-scheduling --port 1", {"async_scheduling": "on", "port": "1"}),
        ("--async-scheduling auto", {"async_scheduling": "auto"}),
        ("--no-async-scheduling m", {"model": "m", "async_scheduling": "off"}),
    ],
)
def test_flags_become_text_by_field(line: str, arguments: dict[str, object]) -> None:
    assert parse(serve.COMMAND, line.split())[:3] == (arguments, None, [])


def test_short_flags_and_the_option_file() -> None:
    assert parse(chat.COMMAND, ["-q", "hi", "--config", "f.yaml"])[:2] == ({"quick": "hi"}, "f.yaml")


def test_a_lone_dash_is_a_value() -> None:
    assert parse(complete.COMMAND, ["-"])[:2] == ({"prompt": "-"}, None)
    assert parse(chat.COMMAND, ["-q", "-"])[:2] == ({"quick": "-"}, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prot 1", "unknown option --prot; did you mean --port?"),
        ("--max-num-seq=1", "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        ("--max-num", "unknown option --max-num; did you mean --max-num-seqs?"),
        ("--no-strict-request", "unknown option --no-strict-request; did you mean --no-strict-requests?"),
        ("--qqqqqqqq", "unknown option --qqqqqqqq"),
        ("-x", "unknown option -x"),
        ("--uds-mod", "unknown option --uds-mod; did you mean --uds-mode?"),
        (
            "--tensor-paralel-size 2",
            "unknown option --tensor-paralel-size; did you mean --tensor-parallel-size?",
        ),
        ("--data-size 2", "unknown option --data-size"),
        ("--force-eager", "unknown option --force-eager"),
        ("--tensor-parallel-size", "--tensor-parallel-size: expected one argument"),
        ("--no-port 1", "unknown option --no-port; did you mean --port?"),
        ("a b", "unexpected argument 'b'"),
        ("--port", "--port: expected one argument"),
        ("--api-key", "--api-key: expected at least one argument"),
        (
            "--strict_requests=yes",
            "--strict-requests takes no value, write --strict-requests or --no-strict-requests",
        ),
        (
            "--no-strict-requests=1",
            "--strict-requests takes no value, write --strict-requests or --no-strict-requests",
        ),
        ("--config a --config b", "--config is given twice"),
    ],
)
def test_bad_lines(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(serve.COMMAND, line.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "line", ["m --api-kye sesame", "m --api-kye=sesame", "m --port 1 --api_keys sesame x"]
)
def test_a_mistyped_flag_does_not_show_its_secret(line: str) -> None:
    with pytest.raises(ConfigError, match="did you mean --api-key") as caught:
        parse(serve.COMMAND, line.split())
    assert "sesame" not in str(caught.value)


def test_help_has_every_option_once_in_its_group() -> None:
    text = build(serve.COMMAND).format_help()
    joined = " ".join(text.split())
    position = -1
    for option in options_of(ServeConfig):
        assert len(re.findall(rf"^  {option.flag}\b(?!-)", text, re.MULTILINE)) == 1
        assert joined.find(help_text(option)) > position
        position = joined.find(help_text(option))
        assert f"\n{option.group}:\n" in text


def test_help_states_default_bounds_and_variable() -> None:
    options = {option.field: option for option in options_of(ServeConfig)}
    assert help_text(options["port"]).endswith("[default: 8000; 0 to 65535; PENSTOCK_PORT]")
    assert help_text(options["api_key"]).endswith("[PENSTOCK_API_KEY]")
    assert help_text(options["max_model_len"]).endswith("[at least 2; PENSTOCK_MAX_MODEL_LEN]")


def test_help_begins_with_examples_that_are_accepted() -> None:
    text = build(serve.COMMAND).format_help()
    for line, what in serve.COMMAND.examples:
        assert f"\n  {line}\n      {what}\n" in text.partition("\nModel:\n")[0]
        parse(serve.COMMAND, line.split()[2:])


def test_help_fits_a_narrow_and_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, most in ((72, 72), (300, 100)):
        monkeypatch.setenv("COLUMNS", str(columns))
        widths = [len(line) for line in build(serve.COMMAND).format_help().splitlines()]
        assert max(widths) <= most
