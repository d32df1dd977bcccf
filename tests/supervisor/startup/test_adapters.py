"""Adapters of the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.adapter_files import describe_adapter
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.adapters import start_adapters, states_at_start
from penstock.supervisor.startup.model_resolution import ResolvedModel, check_model_aliases
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.messages import Adapter
from tests.adapters import make_adapter

NAMES = ["m"]


def read(*modules: str, **options: Any) -> list[Adapter]:
    return start_adapters(ServeConfig(enable_lora=True, lora_modules=list(modules), **options), NAMES)


def test_paths_digests_ranks_and_parents(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", base_model="org/base")
    other = make_adapter(tmp_path / "b", rank=4, base_model=None)
    named = json.dumps({"name": "c", "path": str(path), "base_model_name": "x"})
    adapters = read(f"a={path}", f"b={other}/", named)
    digest = describe_adapter(str(path)).digest
    assert adapters == [
        Adapter("a", str(path), "m", digest, 8),
        Adapter("b", str(other), "m", describe_adapter(str(other)).digest, 4),
        Adapter("c", str(path), "x", digest, 8),
    ]


def test_relative_paths_and_paths_over_links_stay_as_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "real" / "a")
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert [adapter.path for adapter in read("a=link/a")] == [str(tmp_path / "link" / "a")]


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [adapter.path for adapter in read("a=~/a")] == [str(tmp_path / "a")]


def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", rank=32)
    for module, message in (
        ("sql=org/sql", r"--lora-modules sql \(org/sql\): no such directory; .* must be downloaded first"),
        (
            json.dumps({"name": "a", "path": str(path), "base_model_name": "x" * 257}),
            "--lora-modules a: base_model_name has more than 256 characters",
        ),
        (f"a={path}", r"--lora-modules a \(.*\): layer .*: its rank is 32; --max-lora-rank is 16"),
        (f"a={tmp_path}", r"--lora-modules a \(.*\): adapter_config\.json: it does not exist"),
        (f"m={path}", "--lora-modules m: the served model has this name"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(module)
    assert read(f"a={path}", max_lora_rank=32)[0].rank == 32
    with pytest.raises(ConfigError, match="--lora-dir /none/such: no such directory"):
        read(lora_dir="/none/such")


def test_without_adapters_nothing_is_desired() -> None:
    assert start_adapters(ServeConfig(), NAMES) == []
    store = states_at_start([])
    assert (store.table().states, store.settled()) == ([], None)


def test_the_first_list() -> None:
    adapters = [Adapter("a", "/a", None, "d", 8)]
    table = states_at_start(adapters).table()
    (state,) = table.states
    assert (state.name, state.generation, state.settled) == (ADAPTERS, 1, True)
    again = states_at_start(adapters).table()
    assert again.changes[ADAPTERS][0].key != table.changes[ADAPTERS][0].key, "a client could have it"
    assert msgspec.convert(state.value, AdapterList).adapters == adapters


def test_a_list_that_is_too_long_to_be_sent() -> None:
    with pytest.raises(ConfigError, match=r"--lora-modules: names and paths have .* the maximum is 262144"):
        states_at_start([Adapter(f"{number}", "/" + "a" * 4000) for number in range(70)])


def test_aliases_may_name_adapters() -> None:
    model = ResolvedModel("/m", "/m", NAMES)
    for engine in ("torch", "vllm", "synthetic"):
        config = ServeConfig(engine=engine, model_alias=["gpt-*=a"])  # type: ignore[arg-type]
        check_model_aliases(config, model, [Adapter("a", "/a")])
        with pytest.raises(ConfigError, match=r"--model-alias gpt-\*=a: a is not served; served are m"):
            check_model_aliases(config, model)


def test_aliases_may_name_adapters_that_requests_load_later(caplog: pytest.LogCaptureFixture) -> None:
    model = ResolvedModel("/m", "/m", ["m"])
    options: dict[str, Any] = {"engine": "synthetic", "enable_lora": True, "lora_dir": "/d"}
    check_model_aliases(ServeConfig(model_alias=["gpt-*=a", "x=m"], **options), model)
    assert caplog.messages == ["--model-alias gpt-*=a: no adapter has this name yet"]
    with pytest.raises(ConfigError, match="m is the name of a served model"):
        check_model_aliases(ServeConfig(model_alias=["m=a"], **options), model)
