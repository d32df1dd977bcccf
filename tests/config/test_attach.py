"""--attach: what goes with it, and the commands of its engines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.serve import ServeConfig
from penstock.engine.attach.launch.serve_command import attach_commands
from penstock.wire.vllm.addresses import address_towards, split_address
from penstock.wire.vllm.model_kind import has_experts

ATTACH = "127.0.0.1:29550"


def test_attached_engines_are_vllms() -> None:
    config = ServeConfig(model="m", attach=ATTACH, data_parallel_size=3)
    assert config.engine == "vllm"
    assert config.ranks == range(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "synthetic"}, "--engine synthetic: does not go with --attach"),
        ({"headless": True}, "--headless: does not go with --attach"),
        (
            {"coordinator": "tcp://h:1", "cluster_key_file": "f"},
            "--coordinator tcp://h:1: does not go with --attach",
        ),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "--enable-expert-parallel: does not go"),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 3},
            "--data-parallel-size-local 3: with --attach",
        ),
        ({"data_parallel_start_rank": 1}, "--data-parallel-start-rank 1: does not go with --attach"),
        ({"attach": "h:99999"}, "99999 is no port"),
        ({"attach": "h:0", "print_engine_command": True}, "--print-engine-command: needs a port"),
        ({"model": None}, "name MODEL, the engines' model"),
        ({"data_parallel_size_local": 0}, "--data-parallel-size-local 0: with --attach"),
        ({"attach": "h:65533", "data_parallel_size": 2}, "2 engines take ports up to 65537"),
    ],
)
def test_what_does_not_go_with_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeConfig(**({"model": "m", "attach": ATTACH} | options))


def test_the_command_needs_an_address() -> None:
    with pytest.raises(ValueError, match="--print-engine-command: needs --attach"):
        ServeConfig(print_engine_command=True)


def test_one_command_for_each_host() -> None:
    config = ServeConfig(
        model="org/model",
        attach="10.0.0.1:29550",
        revision="abc",
        data_parallel_size=4,
        data_parallel_size_local=2,
        max_model_len=4096,
        max_num_seqs=64,
        enable_lora=True,
        engine_args=["--tensor-parallel-size", "2"],
    )
    given = ["attach", "data_parallel_size", "max_model_len", "max_num_seqs", "enable_lora"]
    commands = [shlex.split(line) for line in attach_commands(config, "org/model", given)]
    assert [command[:4] for command in commands] == [["vllm", "serve", "org/model", "--headless"]] * 2
    rest = [dict(zip(command[4:-1:2], command[5::2], strict=False)) for command in commands]
    assert [each["--data-parallel-start-rank"] for each in rest] == ["0", "2"]
    for command in commands:
        text = shlex.join(command)
        assert "--data-parallel-size 4 --data-parallel-size-local 2" in text
        assert "--revision abc" in text
        assert "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29550" in text
        assert "--max-model-len 4096 --max-num-seqs 64" in text
        assert "--enable-lora --max-loras 4 --max-lora-rank 16 --max-cpu-loras 128" in text
        assert text.endswith("--tensor-parallel-size 2")


def test_options_of_other_engines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["serve", "m", "--attach", ATTACH, "--device", "cpu", "--print-engine-command"])
    assert code == 2
    assert "--device cpu: is not for vLLM's engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ("--headless", "the command has it already"),
        ("--data-parallel-size=2", "the command has it already"),
        ("--port", "clients connect here"),
    ],
)
def test_what_is_not_the_engines_is_refused_behind_the_dashes(
    behind: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", "--attach", ATTACH, "--print-engine-command", "--", behind]) == 2
    assert f"{behind} behind --: with --attach it is not the engine's: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-parallel-rpc-port", "29550"], "it is part of --attach HOST:PORT here, leave it out"),
        (["--data-parallel-address", "h"], "it is part of --attach HOST:PORT here, leave it out"),
        (["--enable-sleep-mode"], "an option of vLLM's engine, it goes behind --"),
        (["--tensor-parallel-size", "2"], "an option of vLLM's engine, it goes behind --"),
        (["--engine", "torch"], "--engine torch: does not go with --attach"),
    ],
)
def test_vllms_own_flags_are_advised_on(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", "--attach", ATTACH, *flags, "--print-engine-command"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "--coordinator" not in said
    assert "--engine vllm" not in said


def test_the_command_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["serve", str(tmp_path), "--attach", ATTACH, "--print-engine-command", "--", "--x", "a b"]) == 0
    )
    assert capsys.readouterr().out == (
        f"vllm serve {tmp_path} --headless --data-parallel-size 1 --data-parallel-size-local 1 "
        "--data-parallel-start-rank 0 --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 29550 "
        "--x 'a b'\n"
    )


@pytest.mark.parametrize("text", ["h", "h:", ":1", "h:123456", "h:1x", "tcp://h:1", "a b:1", "::1:5"])
def test_addresses_are_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--attach", text, "--print-engine-command"]) == 2
    assert "--attach" in capsys.readouterr().err


def test_addresses() -> None:
    assert split_address("[::1]:5") == ("::1", 5)
    assert split_address("host:29550") == ("host", 29550)
    assert address_towards("10.0.0.1", "10.0.0.2") == "10.0.0.1"
    assert address_towards("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match="does not appear to be"):
        address_towards("0.0.0.0", "an unknown address")


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"model_type": "llama"}, False),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 0}, False),
        ({"text_config": {"num_experts": 128}}, True),
        ({"moe_num_experts": [0, 8]}, True),
        ({"block_configs": [{"block_type": "moe", "n_routed_experts": 4}]}, True),
        ([], False),
    ],
)
def test_models_whose_engines_step_together(config: Any, experts: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_experts(tmp_path) is experts


def test_a_model_without_a_config_has_no_experts(tmp_path: Path) -> None:
    assert not has_experts(tmp_path)
