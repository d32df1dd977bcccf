"""The options of adapters, before and behind ``--``."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.adapters.lora_modules import LoraModule, LoraSettings, lora_settings
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig


def settings(*behind: str, **options: Any) -> LoraSettings:
    options = {"engine": "vllm" if behind else "torch", "enable_lora": True} | options
    return lora_settings(ServeConfig(engine_args=list(behind) or None, **options), ("m",))


def test_without_any() -> None:
    found = lora_settings(ServeConfig())
    assert not found.enabled
    assert (found.modules, found.engine_args) == ((), ())


def test_both_forms() -> None:
    found = settings(
        lora_modules=["a=/a", "b=org/b=1", '{"name": "c", "path": "/c", "base_model_name": "x"}']
    )
    assert found.modules == (LoraModule("a", "/a"), LoraModule("b", "org/b=1"), LoraModule("c", "/c", "x"))
    assert (found.enabled, found.max_loras, found.max_lora_rank, found.max_cpu_loras) == (True, 4, 16, 64)


def test_behind_the_dashes_among_other_arguments() -> None:
    found = settings(
        *["--enable-lora", "--lora-modules", "a=/a", "b=/b", "--max-loras", "2", "--lora-dtype", "auto"],
        *["--max_lora_rank=32", "--max-cpu-loras", "3", "--lora_modules=c=/c", "--seed", "-1"],
        enable_lora=False,
    )
    assert [module.name for module in found.modules] == ["a", "b", "c"]
    assert (found.enabled, found.max_loras, found.max_lora_rank, found.max_cpu_loras) == (True, 2, 32, 3)
    assert found.engine_args == (
        *("--enable-lora", "--max-loras", "2", "--lora-dtype", "auto", "--max_lora_rank=32"),
        *("--max-cpu-loras", "3", "--seed", "-1"),
    )


def test_what_stands_behind_wins_and_modules_add_up() -> None:
    found = settings("--max-loras", "3", "--lora-modules", "b=/b", max_loras=2, lora_modules=["a=/a"])
    assert (found.max_loras, [module.name for module in found.modules]) == (3, ["a", "b"])
    assert not settings("--no-enable-lora").enabled


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a"], "--lora-modules a: it must be NAME=PATH"),
        (["a="], "it must be NAME=PATH"),
        (["=/a"], "it must be NAME=PATH"),
        (['{"name": "a"}'], "missing required field `path`"),
        (['{"name": "a", "path": "p", "rank": 1}'], "unknown field `rank`"),
        (["a=/a", "a=/b"], "--lora-modules a: there are two adapters of this name"),
        (["m=/a"], "--lora-modules m: the served model has this name"),
        (["a,b=/a"], "--lora-modules: 'a,b' has the character ','"),
        (["a\n=/a"], r"--lora-modules: 'a\\n' has the character '\\n'"),
        ([" a=/a"], "--lora-modules: ' a' begins or ends with a space"),
        (["a" * 257 + "=/a"], "--lora-modules: a name of 257 characters, 1 to 256 are allowed"),
        (["a=/\0"], "--lora-modules a: its path is none"),
        ([f"a=/{'x' * 4096}"], "--lora-modules a: its path is none"),
    ],
)
def test_what_is_wrong_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(lora_modules=texts)
    with pytest.raises(ConfigError, match=message):
        settings("--enable-lora", "--lora-modules", *texts, enable_lora=False)


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (["--lora-modules"], "--lora-modules/--lora_modules: expected at least one argument"),
        (["--max-loras", "x"], "--max-loras/--max_loras: invalid int value: 'x'"),
        (["--max-loras", "5", "--max-cpu-loras", "4"], "--max-cpu-loras 4: it must be at least --max-loras"),
        (["--no-enable-lora", "--lora-modules", "a=/a"], "--lora-modules: needs --enable-lora"),
        (
            ["--max-loras", "1", "--max-cpu-loras", "1", "--lora-modules", "a=/a", "b=/b"],
            "--lora-modules: these are 2 adapters; --max-cpu-loras is 1",
        ),
    ],
)
def test_what_contradicts_itself_behind_the_dashes(behind: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*behind)


def test_a_directory_of_adapters_needs_them_enabled() -> None:
    with pytest.raises(ConfigError, match="--lora-dir: needs --enable-lora"):
        settings("--no-enable-lora", lora_dir="/d", enable_lora=True)
