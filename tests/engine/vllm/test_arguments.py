"""Penstock's options as vLLM's arguments."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.config.errors import ConfigError
from penstock.config.introspect import options_of
from penstock.config.serve import ServeConfig
from penstock.engine.vllm.arguments import OTHER_NAME, REFUSED, SAME_NAME, arguments


def given(**options: Any) -> list[str]:
    config = ServeConfig(engine="vllm", **options)
    return arguments(config, "/model", [name for name in options if name != "engine_args"])


def test_what_is_not_set_is_left_to_vllm() -> None:
    assert given() == ["--model", "/model", "--max-num-seqs", "1024"]


def test_what_is_set_is_passed_on_even_when_it_equals_the_default() -> None:
    assert given(block_size=16, enable_prefix_caching=True, seed=0, gpu_memory_utilization=0.9)[4:] == [
        *("--block-size", "16"),
        "--enable-prefix-caching",
        *("--seed", "0"),
        *("--gpu-memory-utilization", "0.9"),
    ]


def test_names_and_forms_that_differ() -> None:
    assert given(kv_cache_memory=1 << 20)[4:] == ["--kv-cache-memory-bytes", "1048576"]
    assert given(enable_prefix_caching=False)[4:] == ["--no-enable-prefix-caching"]
    assert given(enforce_eager=True)[4:] == ["--enforce-eager"]
    assert given(async_scheduling="on")[4:] == ["--async-scheduling"]
    assert given(async_scheduling="off")[4:] == ["--no-async-scheduling"]
    assert given(async_scheduling="auto")[4:] == []
    assert given(max_num_seqs=7)[2:] == ["--max-num-seqs", "7"]


def test_kv_events_have_penstocks_defaults() -> None:
    flag, text = given(kv_events_config='{"enable_kv_cache_events": true, "topic": "kv@a@b"}')[4:]
    assert flag == "--kv-events-config"
    fields = msgspec.json.decode(text)
    assert (fields["endpoint"], fields["topic"]) == ("tcp://127.0.0.1:5557", "kv@a@b")
    assert "publisher" not in fields


def test_the_operators_own_arguments_come_last() -> None:
    own = ["--tensor-parallel-size", "2"]
    assert given(dtype="float32", engine_args=own)[4:] == ["--dtype", "float32", *own]


def test_limits_of_adapters_are_passed_on_and_adapters_are_not() -> None:
    limits = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--max-cpu-loras", "64"]
    assert given(enable_lora=True, max_loras=2, lora_modules=["a=/a"], lora_dir="/d")[4:] == limits
    assert given(max_loras=2)[4:] == []
    behind = ["--enable-lora", "--lora-modules", "a=/a", "--max-loras", "2", "--lora-dtype", "auto"]
    assert given(engine_args=behind)[4:] == [
        *limits,
        *("--enable-lora", "--max-loras", "2", "--lora-dtype", "auto"),
    ]


def test_options_of_the_api_server_do_not_reach_vllm() -> None:
    assert given(port=1234, stream_interval=4, max_num_queued_reqs=1)[4:] == []


@pytest.mark.parametrize("field", REFUSED)
def test_options_of_other_engines_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} cannot be set with --engine vllm: "):
        arguments(ServeConfig(engine="vllm"), "/model", [field])


def test_every_name_is_an_option() -> None:
    fields = {option.field for option in options_of(ServeConfig)}
    assert fields >= {*SAME_NAME, *OTHER_NAME, *REFUSED}


def test_arguments_for_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--engine-args --foo: these are for --engine vllm, not torch"):
        ServeConfig(engine_args=["--foo"])
