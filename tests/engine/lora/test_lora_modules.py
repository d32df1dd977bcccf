"""Adapters as `vllm serve` is told of them."""

from __future__ import annotations

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.lora.lora_modules import parse_lora_modules
from penstock.wire.messages import Adapter

MODEL = ("m",)


def test_both_forms_among_other_arguments() -> None:
    text = '{"name": "c", "path": "/c", "base_model_name": "b"}'
    own = ["--enable-lora", "--lora-modules", "a=/a", "b=org/b=1", text, "--max-loras", "2"]
    adapters, others = parse_lora_modules(own, MODEL)
    assert adapters == (Adapter("a", "/a"), Adapter("b", "org/b=1"), Adapter("c", "/c", "b"))
    assert others == ["--enable-lora", "--max-loras", "2"]


def test_underscores_an_equals_sign_and_a_second_time() -> None:
    adapters, others = parse_lora_modules(["--lora_modules=a=/a", "--lora-modules", "b=/b"], MODEL)
    assert [adapter.name for adapter in adapters] == ["a", "b"]
    assert others == []


def test_without_any_all_arguments_stay() -> None:
    own = ["--lora-dtype", "auto", "--seed", "-1"]
    assert parse_lora_modules(own, MODEL) == ((), own)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["--lora-modules"], "expected at least one argument"),
        (["--lora-modules", "a"], "--lora-modules a: it must be NAME=PATH"),
        (["--lora-modules", "=/a"], "it must be NAME=PATH"),
        (["--lora-modules", '{"name": "a"}'], "missing required field `path`"),
        (["--lora-modules", '{"name": "a", "path": "p", "rank": 1}'], "unknown field `rank`"),
        (["--lora-modules", "a=/a", "a=/b"], "--lora-modules a: there is a model of this name already"),
        (["--lora-modules", "m=/a"], "--lora-modules m: there is a model of this name already"),
    ],
)
def test_what_is_wrong_is_named(own: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_lora_modules(own, MODEL)
