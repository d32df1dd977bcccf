"""What operators of vLLM and SGLang write: flags, keys of option files and variables."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from penstock.cli import serve
from penstock.cli.main import main
from penstock.cli.parser import parse
from penstock.config.client import ChatConfig
from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.introspect import options_of
from penstock.config.origins import Origin
from penstock.config.other_servers import (
    lookup,
    sglang_advice,
    tei_advice,
    vllm_advice,
    vllm_environment,
    vllm_values,
)
from penstock.config.other_servers.known_flag import EngineFlag, IgnoredFlag, MappedFlag
from penstock.config.other_servers.vllm_names import FILE, vllm_names
from penstock.config.serve import ServeConfig
from penstock.config.sources import OtherServers, Resolved, resolve
from penstock.config.values import convert
from tests.engine.attach import known_names

FLAGS, NAMES = vllm_names().flags, vllm_names().variables
OWN = {option.flag: option for option in options_of(ServeConfig) if not option.positional}
ADVICE = (
    vllm_advice.ADVICE
    | {name: advice for name, (_, advice) in vllm_advice.EARLIER.items()}
    | {name: advice for name, (_, advice) in sglang_advice.ADVICE.items()}
    | {name: advice for name, (_, advice) in tei_advice.ADVICE.items()}
)


def served(line: str, environ: dict[str, str] | None = None) -> Resolved[ServeConfig]:
    """What ``penstock serve`` makes of a command line and an environment."""
    read = parse(serve.COMMAND, line.split())
    return resolve(
        ServeConfig,
        read.arguments,
        environ or {},
        file=read.file,
        other_servers=OtherServers(read.foreign, read.rest),
    )


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        served(line)
    return str(caught.value)


# -- the tables ----------------------------------------------------------------------------------------


def test_every_flag_of_vllm_has_an_answer() -> None:
    for name in FLAGS.keys() - OWN.keys() - {"--config"}:
        spelling = lookup.find(name)
        assert spelling is not None
        assert spelling.flag.engine or spelling.flag.advice is not None, name


def test_the_file_of_names_is_as_its_writer_writes_it() -> None:
    assert known_names.text_of(vllm_names()) == FILE.read_text()


def test_no_advice_is_about_a_flag_that_does_not_exist_or_is_ours() -> None:
    assert not vllm_advice.ADVICE.keys() - FLAGS.keys()
    assert not ADVICE.keys() & OWN.keys()
    assert not vllm_advice.OF_THE_SERVER - FLAGS.keys()
    assert not vllm_advice.EARLIER.keys() & FLAGS.keys()


@pytest.mark.parametrize(
    ("name", "flag"), [(name, each.flag) for name, each in ADVICE.items() if isinstance(each, MappedFlag)]
)
def test_advice_names_flags_that_exist(name: str, flag: str) -> None:
    assert flag == "MODEL" or flag.split()[0].replace("--no-", "--") in OWN, name


@pytest.mark.parametrize(("flag", "value"), vllm_values.VALUES)
def test_values_become_values_that_are_allowed(flag: str, value: str) -> None:
    convert(OWN[flag], Origin("command line", flag), vllm_values.VALUES[flag, value])


def test_variables_have_one_place_each() -> None:
    places = (vllm_environment.HONOURED.keys(), vllm_environment.SERVER.keys(), vllm_environment.SILENT)
    assert sum(map(len, places)) == len(set().union(*places))
    assert not set().union(*places) - NAMES
    assert not vllm_environment.EARLIER.keys() & NAMES
    assert set(vllm_environment.HONOURED.values()) <= {option.field for option in options_of(ServeConfig)}


# -- the command line ----------------------------------------------------------------------------------


def test_the_usual_line_of_vllm_serves() -> None:
    line = (
        "m --tensor-parallel-size 1 --gpu-memory-utilization 0.8 --max-model-len 4096 --max-num-seqs 64 "
        "--enable-prefix-caching --served-model-name x --dtype half --trust-remote-code --port 8001 "
        "--host 127.0.0.1 --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 "
        "--chat-template f --uvicorn-log-level warning --disable-log-requests --no-enable-log-requests "
        '--allowed-origins ["*"] --pipeline-parallel-size=1 --enforce-eager -O3 --max_log_len 5'
    )
    config, _, remarks = served(line)
    assert config == ServeConfig(
        model="m",
        gpu_memory_utilization=0.8,
        max_model_len=4096,
        max_num_seqs=64,
        served_model_name=["x"],
        dtype="float16",
        port=8001,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        chat_template="f",
        allowed_origins=["*"],
        enforce_eager=True,
    )
    assert remarks == [
        "note: --dtype half is taken as float16",
        "note: --tensor-parallel-size 1 has no effect: it is vLLM's default",
        "note: --trust-remote-code has no effect: Penstock's own engines run no code of a model's",
        "note: --enable-auto-tool-choice has no effect: "
        "tool calls are parsed wherever the model's format is known",
        "note: --uvicorn-log-level warning has no effect: one log holds all; --log-level sets its level",
        "note: --disable-log-requests has no effect: requests are not logged",
        "note: --no-enable-log-requests has no effect: it is vLLM's default",
        "note: --pipeline-parallel-size 1 has no effect: it is vLLM's default",
        "note: -O 3 has no effect: Penstock's own engines compile nothing",
        "note: --max_log_len 5 has no effect: "
        "requests and replies are not logged; --access-log all logs one line for each",
    ]


def test_flags_of_the_engine_show_the_line_that_works() -> None:
    line = "m --engine vllm -tp 2 --port 1 --quantization=fp8 --compilation-config.mode 3 --no-enable-eplb"
    text = refusal(
        f"{line} --enable-sleep-mode --lora-target-modules q_proj k --api-key sesame -- --fully-sharded-loras"
    )
    assert text.splitlines() == [
        "5 flags of other servers:",
        "  -tp 2: an option of vLLM's engine, it goes behind --",
        "  --quantization fp8: an option of vLLM's engine, it goes behind --",
        "  --compilation-config.mode 3: an option of vLLM's engine, it goes behind --",
        "  --enable-sleep-mode: an option of vLLM's engine, it goes behind --",
        "  --lora-target-modules q_proj k: an option of vLLM's engine, it goes behind --",
        "Write: penstock serve m --engine vllm --port 1 --api-key '***' -- --fully-sharded-loras -tp 2 "
        "--quantization fp8 --compilation-config.mode 3 --enable-sleep-mode --lora-target-modules q_proj k",
    ]


def test_another_engine_shows_the_line_for_vllms() -> None:
    text = refusal("m --trust-remote-code -tp 2 --engine torch --kv-cache-memory-bytes 1g")
    assert text.splitlines() == [
        "2 flags of other servers:",
        "  -tp 2: an option of vLLM's engine, it goes behind -- with --engine vllm; "
        "the torch engine has none like it: it runs on one device; --data-parallel-size starts several",
        "  --kv-cache-memory-bytes 1g: it is --kv-cache-memory here",
        "Write: penstock serve m --engine vllm --kv-cache-memory 1g -- --trust-remote-code -tp 2",
    ]


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("--mm-processor-cache-gb 2", "--media-cache 2Gi"),
        ("--mm-processor-cache-gb 0.3", "--media-cache 322122547"),
        ("--mm-processor-cache-gb 0", ""),
        ("--mm-preprocess-cache-size-mb 512", "--media-cache 512Mi"),
        ("--media-url-max-file-size-mb 8", "--media-max-bytes 8Mi"),
    ],
)
def test_sizes_become_bytes(given: str, here: str) -> None:
    text = refusal(f"m {given}")
    assert text.partition("Write: penstock serve m")[2].split() == here.split()


@pytest.mark.parametrize(
    ("given", "coordinator"),
    [
        ("--data-parallel-address h --data-parallel-rpc-port 9", "tcp://h:9"),
        ("-dpp 9 -dpa ::1", "tcp://[::1]:9"),
        ("--data-parallel-address h", "tcp://h:29550"),
        ("--data-parallel-rpc-port 9", "tcp://127.0.0.1:9"),
    ],
)
def test_an_address_and_a_port_become_one_coordinator(given: str, coordinator: str) -> None:
    text = refusal(f"m {given} --data-parallel-size 4 --data-parallel-size-local 2")
    corrected = " ".join(shlex.split(text.partition("Write: penstock serve ")[2]))
    config = served(corrected).config
    assert (config.coordinator, config.cluster_key_file) == (coordinator, "FILE")


@pytest.mark.parametrize("behind", [True, False])
def test_the_line_that_is_shown_is_accepted(behind: bool) -> None:
    line = "--model m --sse-keep-alive-interval 5 -dp 2" + " -q awq" * behind
    corrected = refusal(line).partition("Write: penstock serve ")[2]
    config = served(corrected).config
    assert (config.model, config.sse_keep_alive, config.data_parallel_size) == ("m", 5, 2)
    assert config.engine_args == (["-q", "awq"] if behind else None)


@pytest.mark.parametrize("dash", ["-", "_"])
def test_every_flag_serves_or_shows_a_line_that_serves(dash: str) -> None:
    """A note about it, or one line to write, which is accepted."""
    for name in lookup.names():
        spelling = lookup.find(name)
        assert spelling is not None
        if name in OWN or name == "--config":
            continue
        value = {"0": "", "+": " a=/a b=/b"}.get(spelling.flag.values, " 7")
        model = "" if name in ("--model", "--model-path") else "m"
        line = f"{model} --port 9 --device cpu --{name[2:].replace('-', dash)}{value}"
        try:
            config = served(line).config
        except ConfigError as error:
            _, write, corrected = str(error).partition("\nWrite: penstock serve ")
            if not write and "use vLLM's own server" in str(error):
                continue
            assert write, line
            assert "\n" not in corrected, line
            if isinstance(spelling.flag.advice, MappedFlag) or spelling.flag.name in OWN:
                continue  # the option may need another one, or not take this value
            written = shlex.split(corrected)
            read = parse(serve.COMMAND, written)
            config = resolve(
                ServeConfig, read.arguments, {}, other_servers=OtherServers(read.foreign, read.rest)
            ).config
            assert config.engine == "torch" or "--device" not in written, line
        assert config.port == 9, line
        assert config.model == (model or "7")


MISTRAL = (
    "mistralai/M --tokenizer_mode mistral --config_format mistral --load_format mistral"
    " --tool-call-parser mistral --enable-auto-tool-choice --tensor-parallel-size 2"
)


@pytest.mark.parametrize(
    ("line", "write"),
    [
        (MISTRAL, "mistralai/M --tool-call-parser mistral --engine vllm -- --tokenizer_mode mistral"
            " --config_format mistral --load_format mistral --tensor-parallel-size 2"),
        ("--model /m --load-format bitsandbytes --max_model_len 2048", "/m --max_model_len 2048 --engine vllm"
            " -- --load-format bitsandbytes"),
        ("m --load-format=gguf", "m --engine vllm -- --load-format gguf"),
        ("m --engine vllm --max-model-len auto", "m --engine vllm -- --max-model-len auto"),
        ("m --max-model-len -1 --block-size 512", "m --engine vllm -- --max-model-len -1 --block-size 512"),
        ("m -tp 8 --enable-expert-parallel", "m --engine vllm -- -tp 8 --enable-expert-parallel"),
        ("m -tp 8 -ep", "m --engine vllm -- -tp 8 -ep"),
        ("m -ep -dp 2", "m --enable-expert-parallel --data-parallel-size 2"),
        ("m -tp 2 -cc.mode=3 -O.x=2 -O3", "m --engine vllm -- -tp 2 -cc.mode 3 -O.x 2 -O 3"),
        ("m --tool-call-parser beam --port 1", "m --port 1"),
        ("m --reasoning_parser beam -tp 2", "m --engine vllm -- -tp 2"),
        ("m --generation-config /d", "m"),
        ("m --middleware a.b --grpc --port 1", "m --port 1"),
        ("m --runner generate --enable-prompt-embeds", "m --runner generate"),
        ("m --device cuda -q awq", "m --engine vllm -- -q awq"),
        ("m --device cuda --batch-invariant --threads=3 -q awq", "m --engine vllm -- -q awq"),
        # lines of model cards, recipes and cookbooks, shortened
        ("m --tensor-parallel 4 --mm-encoder-tp-mode data", "m --engine vllm -- --tensor-parallel-size 4"
            " --mm-encoder-tp-mode data"),
        ("m --reasoning-parser-plugin p.py --reasoning-parser nano_v3 -tp 1", "m"),
        ("m --tool-parser-plugin p.py --tool-call-parser own --port 1", "m --port 1"),
        ('m --rope-scaling {"rope_type":"yarn","factor":4.0} --max-model-len 9', "m --max-model-len 9"
            " --engine vllm -- --hf-overrides.rope_parameters '{\"rope_type\":\"yarn\",\"factor\":4.0}'"),
        ("m -dp 8 --enable-expert-parallel --mm-encoder-only", "m --attach 127.0.0.1:29550"
            " --data-parallel-size 8 -- --mm-encoder-only --enable-expert-parallel"),
        ("m --data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-address 10.0.0.1"
            " --data-parallel-rpc-port 9 --enable-expert-parallel --headless --data-parallel-start-rank 8",
            "m --data-parallel-size 16 --data-parallel-size-local 8 --attach 10.0.0.1:9 --"
            " --enable-expert-parallel"),
        ("--model-path m --tp 8 --ep 8 --dp 2 --enable-dp-attention --reasoning-parser deepseek-r1", "m"
            " --reasoning-parser deepseek-r1 --engine vllm --data-parallel-size 2 -- --tensor-parallel-size 8"
            " --enable-expert-parallel"),
        ("--model m --tp 1 --mem-frac 0.8 --speculative-algo EAGLE --speculative-num-steps 3"
            " --tool-call-parser qwen25", "m --tool-call-parser qwen25 --gpu-memory-utilization 0.8"),
        ("--model-path m --nsa-prefill-backend tilelang --json-model-override-args {} --lora-path a=/a", "m"
            " --engine vllm --enable-lora --lora-modules a=/a -- --hf-overrides '{}'"),
    ],
)  # fmt: skip
def test_values_of_vllms_alone_show_the_whole_line(line: str, write: str) -> None:
    text = refusal(line)
    assert text.partition("\nWrite: penstock serve ")[2] == write
    read = parse(serve.COMMAND, shlex.split(write))
    config = resolve(
        ServeConfig, read.arguments, {}, other_servers=OtherServers(read.foreign, read.rest)
    ).config
    assert config.model == write.split()[0]


@pytest.mark.parametrize("name", [*vllm_values._SGLANGS_TOOLS, *vllm_values._SGLANGS_REASONING])
def test_formats_by_sglangs_names(name: str) -> None:
    flag = "--tool-call-parser" if name in vllm_values._SGLANGS_TOOLS else "--reasoning-parser"
    assert served(f"m {flag} {name}").remarks == [
        f"note: {flag} {name} is taken as {vllm_values.VALUES[flag, name]}"
    ]


@pytest.mark.parametrize(
    ("line", "write"),
    [
        ("--served-model-name x Qwen/Qwen3-8B --port 1", "Qwen/Qwen3-8B --served-model-name x --port 1"),
        ("--port 1 --api-key sesame ./m", "./m --port 1 --api-key '***'"),
    ],
)
def test_an_option_that_swallowed_the_model(line: str, write: str) -> None:
    assert refusal(line).partition("\nWrite: penstock serve ")[2] == write
    assert served("--served-model-name x y --port 1").config.model is None


def test_what_vllms_engine_calls_otherwise_exists_there() -> None:
    for advice in ADVICE.values():
        if isinstance(advice, EngineFlag):
            assert FLAGS[advice.flag.partition(".")[0]].of_engine


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--load-format safetensor",
            "--load-format: 'safetensor' is not valid, it takes auto, safetensors or",
        ),
        ("--tool-call-parser hermess", "--tool-call-parser: 'hermess' is not valid"),
        ("--enable-expert-parallel", "experts are split over the engines of --data-parallel-size"),
        ("--max-model-len x", "--max-model-len: 'x' is not valid"),
    ],
)
def test_mistakes_are_told_as_such(line: str, message: str) -> None:
    assert refusal(line).startswith(message) or message in refusal(line)


def test_a_value_of_vllms_alone_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: m\nload-format: tensorizer\ntensor-parallel-size: 2\n")
    advice = refusal(f"--config {file}").partition("In the file:\n")[2]
    assert textwrap.dedent(advice) == (
        'engine: vllm\nengine-args: ["--load-format", "tensorizer", "--tensor-parallel-size", "2"]'
    )
    file.write_text("model: m\nload-format: safetensors\n")
    assert served(f"--config {file}").config.load_format == "safetensors"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--grpc", "--grpc: vLLM's, not supported: Penstock serves HTTP"),
        ("--tp 2", "--tp 2: it is --tensor-parallel-size of vLLM's engine, behind -- with --engine vllm"),
        ("--lora-paths a=/a", "--lora-paths a=/a: it is --enable-lora --lora-modules here, each NAME=PATH"),
        ("--rope-theta 5", "it is --hf-overrides.rope_parameters.rope_theta of vLLM's engine, behind --"),
        ("--dllm-algorithm x", "--dllm-algorithm x: SGLang's, not supported"),
        (
            "x --served-model-name a --omni --usp 4",
            "--omni: models that make images, sound or video are for vLLM-Omni",
        ),
        (
            "x --headless --nnodes 2 --node-rank 1",
            "--headless with --node-rank: vllm serve runs the further nodes",
        ),
        (
            "-tp 2 -dp 8 --enable-expert-parallel",
            "vllm serve --headless runs them, with the command that --print-engine",
        ),
        ("--max-loras-per-batch 2", "--max-loras-per-batch 2: it is --max-loras here"),
        ("--context-length 5", "--context-length 5: it is --max-model-len here"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill: an option of vLLM's engine"),
        ("--device-memory-utilization 0.5", "it is --gpu-memory-utilization here"),
        ("--hf-token sesame", "--hf-token ***: an option of vLLM's engine"),
    ],
)
def test_what_a_flag_is_here(line: str, message: str) -> None:
    text = refusal(line)
    assert message in text
    assert "sesame" not in text


def test_the_command_prints_remarks_and_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--swap-space", "4", "--coordinator", "tcp://h:1"]) == 2
    assert capsys.readouterr().err.startswith("penstock: error: --coordinator")
    assert main(["gateway", "--tensor-parallel-size", "2"]) == 2
    assert "unknown option --tensor-parallel-size\n" in capsys.readouterr().err


# -- option files --------------------------------------------------------------------------------------


def test_a_file_of_vllms(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nport: 9\ntensor_parallel_size: 1\nenable-auto-tool-choice: true\n"
        "trust-remote-code: false\nasync-scheduling: true\n"
    )
    config, _, remarks = served(f"--config {file}")
    assert config == ServeConfig(model="m", port=9, async_scheduling="on")
    assert [remark.partition(" has no effect")[0] for remark in remarks] == [
        f"note: {file}:6: async-scheduling true is taken as on",
        f"note: {file}:3: tensor-parallel-size 1",
        f"note: {file}:4: enable-auto-tool-choice",
        f"note: {file}:5: trust-remote-code",
    ]


def test_flags_of_the_engine_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "engine: vllm\ntensor-parallel-size: 2\ncompilation-config:\n  mode: 3\nenable-sleep-mode: true\n"
        "sse-keep-alive-interval: 5\n"
    )
    assert refusal(f"--config {file}").splitlines()[1:] == [
        f"  {file}:2: tensor-parallel-size 2: an option of vLLM's engine, it goes behind --",
        f'  {file}:3: compilation-config {{"mode": 3}}: an option of vLLM\'s engine, it goes behind --',
        f"  {file}:5: enable-sleep-mode: an option of vLLM's engine, it goes behind --",
        f"  {file}:6: sse-keep-alive-interval 5: it is --sse-keep-alive here",
        "In the file:",
        '  engine-args: ["--tensor-parallel-size", "2", "--compilation-config", '
        '"{\\"mode\\": 3}", "--enable-sleep-mode"]',
    ]


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("m --task embed", "m --runner pooling"),
        ("m --task score --port 1", "m --port 1 --runner pooling"),
        ("--model-path m --is-embedding", "m --runner pooling"),
        ("--model-id m --max-batch-tokens 512 --pooling cls", "m --max-num-batched-tokens 512"),
        ("m --convert=classify", "m --engine vllm -- --convert classify"),
        ("m --pooler-config.pooling_type CLS", "m --engine vllm -- --pooler-config.pooling_type CLS"),
    ],
)
def test_a_server_of_vectors_is_shown_its_line(line: str, written: str) -> None:
    shown = refusal(line).partition("Write: penstock serve ")[2]
    assert shown.replace("--convert=classify", "--convert classify") == written
    assert served(shown).config.runner == (
        "auto" if "vllm" in written else "pooling" if "runner" in written else "auto"
    )


@pytest.mark.parametrize(
    "flags", ["--task generate", "--task auto", "--runner=generate", "--convert none", "--convert auto"]
)
def test_a_server_that_generates_is_what_there_is(flags: str) -> None:
    assert served(f"m {flags}").config.model == "m"


def test_the_lines_for_a_file_are_accepted_in_it(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: m\ntensor-parallel-size: 2\n")
    advice = refusal(f"--config {file}").partition("In the file:\n")[2]
    file.write_text(f"model: m\n{textwrap.dedent(advice)}\n")
    config = served(f"--config {file}").config
    assert (config.engine, config.engine_args) == ("vllm", ["--tensor-parallel-size", "2"])


# -- variables -----------------------------------------------------------------------------------------


def test_vllms_key_locks_every_command() -> None:
    environ = {"VLLM_API_KEY": "a,b"}
    config, origins, remarks = served("", environ)
    assert (config.api_key, origins["api_key"].name, remarks) == (["a,b"], "VLLM_API_KEY", [])
    assert resolve(GatewayConfig, {}, environ).config.api_key == ["a,b"]
    assert resolve(ChatConfig, {}, environ).config.api_key == "a,b"


@pytest.mark.parametrize("own", ["--api-key k", "--api-key-file k"])
def test_a_key_of_penstocks_own_wins_over_vllms(own: str) -> None:
    config, _, remarks = served(own, {"VLLM_API_KEY": "sesame"})
    assert config.api_key in (["k"], None)
    assert remarks == [f"note: VLLM_API_KEY is ignored: {own.split()[0]} is set"]


def test_an_empty_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY: \*\*\* is not valid for --api-key"):
        served("", {"VLLM_API_KEY": ""})


def test_other_variables_of_vllms_server_are_honoured() -> None:
    environ = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "5",
        "VLLM_LOG_STATS_INTERVAL": "3",
    }
    config, _, remarks = served("--log-interval 4", environ)
    assert config == ServeConfig(log_level="warning", keep_alive_timeout=5, log_interval=4)
    assert remarks == ["note: VLLM_LOG_STATS_INTERVAL is ignored: --log-interval is set"]
    assert resolve(GatewayConfig, {}, environ) == (GatewayConfig(), {}, [])


def test_variables_without_effect_are_named_in_one_warning_without_values() -> None:
    environ = {
        "VLLM_USE_MODELSCOPE": "sesame",
        "VLLM_CPU_KVCACHE_SPACE": "sesame",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_OF_A_PLUGIN": "1",
    }
    server = "VLLM_USE_MODELSCOPE (models come from a directory or Hugging Face's hub)"
    engine = "VLLM_CPU_KVCACHE_SPACE (of vLLM's engine, for --engine vllm)"
    text = "warning: variables of vLLM's without effect here: "
    assert served("", environ).remarks == [f"{text}{server}; {engine}"]
    assert served("--engine vllm", environ).remarks == [text + server]
    assert resolve(ChatConfig, {}, environ).remarks == []


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_variables_of_earlier_versions_are_named(engine: str) -> None:
    environ = {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "VLLM_USE_V1": "1"}
    assert served(f"--engine {engine}", environ).remarks == [
        "warning: variables of vLLM's without effect here: VLLM_ATTENTION_BACKEND (of earlier versions; "
        "it is --attention-backend behind --, with --engine vllm); VLLM_USE_V1 (of earlier versions)"
    ]


def test_variables_of_a_service_named_vllm_are_kubernetes() -> None:
    links = {"VLLM_PORT": "tcp://10.0.0.1:8000", "VLLM_SERVICE_HOST": "10.0.0.1"}
    assert served("", links).remarks == []
    assert "VLLM_PORT" in served("", {"VLLM_PORT": "8000"}).remarks[0]


# -- the page ------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_says_the_same() -> None:
    table = {name: (each, lookup.find(name)) for name, each in vllm_advice.ADVICE.items()}
    for name, (advice, spelling) in table.items():
        assert spelling is not None
        if isinstance(advice, MappedFlag):
            assert name == "--model" or f"`{name}`" in section("The same, before `--`"), name
        elif isinstance(advice, IgnoredFlag) or not spelling.flag.engine:
            title = "Without effect" if isinstance(advice, IgnoredFlag) else "Unsupported"
            assert re.search(
                rf"^\|.*`{name}`.* \| {re.escape(advice.why)} \|$", section(title), re.MULTILINE
            ), name


def test_the_page_lists_the_variables() -> None:
    text = section("Variables")
    sets = {name: f"`--{field.replace('_', '-')}`" for name, field in vllm_environment.HONOURED.items()}
    for name, why in (sets | vllm_environment.SERVER | vllm_environment.EARLIER).items():
        assert re.search(rf"^\|.*`{name}`.* \| {re.escape(why)} \|$", text, re.MULTILINE), name
