"""Penstock's options as vLLM's arguments."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.config.errors import ConfigError
from penstock.config.introspect import options_of
from penstock.config.rules.serve_rules import NOT_OF_VLLM
from penstock.config.serve import ServeConfig
from penstock.engine.attach.launch.serve_command import OTHER_NAME, SAME_NAME, launch_arguments

ADDRESS = ("127.0.0.1", 29550)
FIXED = [
    *("serve", "/model", "--headless"),
    *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "29550"),
]

SLOTS = ["--max-num-seqs", "1024"]


def given(**options: Any) -> list[str]:
    """What is behind the model and the address."""
    config = ServeConfig(engine="vllm", **options)
    made = launch_arguments(config, "/model", [name for name in options if name != "engine_args"], ADDRESS)
    assert made[: len(FIXED)] == FIXED
    return made[len(FIXED) :]


def test_what_is_not_set_is_left_to_vllm() -> None:
    assert given() == ["--max-num-seqs", "1024"]


def test_what_is_set_is_passed_on_even_when_it_equals_the_default() -> None:
    assert given(block_size=16, enable_prefix_caching=True, seed=0, gpu_memory_utilization=0.9)[:-2] == [
        *("--block-size", "16"),
        "--enable-prefix-caching",
        *("--seed", "0"),
        *("--gpu-memory-utilization", "0.9"),
    ]


def test_names_and_forms_that_differ() -> None:
    assert given(kv_cache_memory=1 << 20)[:-2] == ["--kv-cache-memory-bytes", "1048576"]
    assert given(enable_prefix_caching=False)[:-2] == ["--no-enable-prefix-caching"]
    assert given(enforce_eager=True)[:-2] == ["--enforce-eager"]
    assert given(async_scheduling="on")[:-2] == ["--async-scheduling"]
    assert given(async_scheduling="off")[:-2] == ["--no-async-scheduling"]
    assert given(async_scheduling="auto")[:-2] == []
    assert given(max_num_seqs=7) == ["--max-num-seqs", "7"]


def test_kv_events_have_penstocks_defaults() -> None:
    flag, text = given(kv_events_config='{"enable_kv_cache_events": true, "topic": "kv@a@b"}')[:2]
    assert flag == "--kv-events-config"
    fields = msgspec.json.decode(text)
    assert (fields["endpoint"], fields["topic"]) == ("tcp://127.0.0.1:5557", "kv@a@b")
    assert "publisher" not in fields


def test_the_operators_own_arguments_come_last() -> None:
    own = ["--tensor-parallel-size", "2"]
    assert given(dtype="float32", engine_args=own) == ["--dtype", "float32", *SLOTS, *own]


def test_limits_of_adapters_are_passed_on_and_adapters_are_not() -> None:
    limits = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--max-cpu-loras", "128"]
    assert given(enable_lora=True, max_loras=2, lora_modules=["a=/a"], lora_dir="/d")[2:] == limits
    assert given(max_loras=2)[2:] == []
    behind = ["--enable-lora", "--lora-modules", "a=/a", "--max-loras", "2", "--lora-dtype", "auto"]
    assert given(engine_args=behind)[2:] == [
        *limits,
        *("--enable-lora", "--max-loras", "2", "--lora-dtype", "auto"),
    ]


def test_options_of_the_api_server_do_not_reach_vllm() -> None:
    assert given(port=1234, stream_interval=4, max_num_queued_reqs=1) == SLOTS


@pytest.mark.parametrize("field", NOT_OF_VLLM)
def test_options_of_other_engines_are_refused_by_name(field: str) -> None:
    value = {"device": "cpu", "threads": 2, "batch_invariant": True, "max_prefill_delay": 2.0}[field]
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}.*: is not for vLLM's engines: "):
        ServeConfig(engine="vllm", **{field: value})


def test_every_name_is_an_option() -> None:
    fields = {option.field for option in options_of(ServeConfig)}
    assert fields >= {*SAME_NAME, *OTHER_NAME, *NOT_OF_VLLM}


def test_arguments_for_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--engine-args --foo: these are for --engine vllm, not torch"):
        ServeConfig(engine_args=["--foo"])


def test_profiles_are_vllms_with_their_directory() -> None:
    flag, text = given(profile_dir="/profiles")[2:]
    assert (flag, msgspec.json.decode(text)) == (
        "--profiler-config",
        {"profiler": "torch", "torch_profiler_dir": "/profiles"},
    )
    own = ["--profiler-config.profiler", "cuda"]
    assert given(profile_dir="/profiles", engine_args=own)[2:] == own


@pytest.mark.parametrize("argument", ["--model=x", "--headless", "--data_parallel_size", "-dp", "--port=1"])
def test_what_the_command_has_already_is_refused_by_name(argument: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{argument} behind --: with --engine vllm it is not the engine's"
    ):
        given(engine_args=[argument])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "torch", "vllm_command": "vllm"}, "is for --engine vllm, not torch"),
        ({"attach": "h:1", "model": "m", "vllm_command": "vllm"}, "does not go with --attach h:1"),
    ],
)
def test_a_command_of_vllms_needs_its_engine(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--vllm-command.*{message}"):
        ServeConfig(**options)


def test_engines_that_are_started_here_are_independent() -> None:
    with pytest.raises(ValueError, match="--enable-expert-parallel: does not go with --engine vllm"):
        ServeConfig(engine="vllm", enable_expert_parallel=True, data_parallel_size=2)
