from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.client import ChatConfig
from penstock.config.describe import option, option_group
from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.introspect import HIDDEN, Option, options_of
from penstock.config.origins import Origin
from penstock.config.serve import ServeConfig
from penstock.config.sources import resolve


def every_option() -> Iterator[Option]:
    return chain(options_of(ServeConfig), options_of(ChatConfig))


@pytest.fixture
def option_file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def test_without_sources_the_defaults_hold() -> None:
    assert resolve(ServeConfig, {}, {}) == (ServeConfig(), {}, [])


@pytest.mark.parametrize("flag", [None, "4"])
@pytest.mark.parametrize("variable", [None, "3"])
@pytest.mark.parametrize("key", [None, "2"])
def test_command_line_beats_environment_beats_file_beats_default(
    option_file: Path, flag: str | None, variable: str | None, key: str | None
) -> None:
    option_file.write_text(f"block-size: {key}\n" if key else "")
    config, origins, _ = resolve(
        ServeConfig,
        {"block_size": flag} if flag else {},
        {"PENSTOCK_BLOCK_SIZE": variable} if variable else {},
        file=str(option_file),
    )
    assert config.block_size == int(flag or variable or key or 16)
    expected = (
        (flag and Origin("command line", "--block-size"))
        or (variable and Origin("environment", "PENSTOCK_BLOCK_SIZE"))
        or (key and Origin("file", f"{option_file}:1: block-size"))
    )
    assert origins == ({"block_size": expected} if expected else {})


def test_sources_add_up(option_file: Path) -> None:
    option_file.write_text("served_model_name: [a, b]\nstrict-requests: true\n")
    config, origins, _ = resolve(
        ServeConfig,
        {"model": "./llama"},
        {"PENSTOCK_API_KEY": "k1, k2", "PENSTOCK_STREAM_INTERVAL": "10", "HOME": "/"},
        file=str(option_file),
    )
    assert config == ServeConfig(
        model="./llama",
        served_model_name=["a", "b"],
        strict_requests=True,
        api_key=["k1", "k2"],
        stream_interval=10,
    )
    assert {field: str(origin) for field, origin in origins.items()} == {
        "model": "MODEL",
        "served_model_name": f"{option_file}:1: served-model-name",
        "strict_requests": f"{option_file}:2: strict-requests",
        "api_key": "PENSTOCK_API_KEY",
        "stream_interval": "PENSTOCK_STREAM_INTERVAL",
    }


def test_a_value_that_is_overridden_is_still_checked() -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_PORT: '-1' is not valid for --port"):
        resolve(ServeConfig, {"port": "1"}, {"PENSTOCK_PORT": "-1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PENSTOCK_MAX_NUM_SEQ", "; did you mean PENSTOCK_MAX_NUM_SEQS?"),
        ("PENSTOCK_port", "; did you mean PENSTOCK_PORT?"),
        ("PENSTOCK_NO_STRICT_REQUESTS", "; did you mean PENSTOCK_STRICT_REQUESTS?"),
        ("PENSTOCK_TEMPERATUR", "; did you mean PENSTOCK_TEMPERATURE?"),
        ("PENSTOCK_CONFG", "; did you mean PENSTOCK_CONFIG?"),
        ("PENSTOCK_", ""),
        ("PENSTOCK_ZZZZZZZZZZZZZZZZZZZZZZZZZZZZ", ""),
    ],
)
def test_an_unknown_variable_is_warned_about_with_the_nearest_name(name: str, hint: str) -> None:
    resolved = resolve(ServeConfig, {}, {name: "sesame"}, other_options=every_option)
    assert resolved == (ServeConfig(), {}, [f"warning: unknown environment variable {name}{hint}"])


@pytest.mark.parametrize("name", ["PENSTOCK_API_KYE", "PENSTOCK_APIKEY", "PENSTOCK_API_KEYFILE"])
def test_a_misspelled_key_does_not_leave_the_server_open(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ServeConfig, {}, {name: "sesame"}, other_options=every_option)
    assert f"unknown environment variable {name}; did you mean PENSTOCK_API_KEY" in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_variables_of_other_commands_are_passed_over() -> None:
    environ = {"PENSTOCK_TEMPERATURE": "1", "PENSTOCK_PORT": "9"}
    assert resolve(ServeConfig, {}, environ, other_options=every_option)[0] == ServeConfig(port=9)
    assert resolve(ChatConfig, {}, environ, other_options=every_option)[0] == ChatConfig(temperature=1.0)


def test_other_commands_are_asked_only_when_a_name_is_not_known() -> None:
    def fail() -> Iterator[Option]:
        raise AssertionError("asked")

    assert resolve(ServeConfig, {}, {"PENSTOCK_PORT": "9"}, other_options=fail)[0].port == 9


def test_the_environment_may_name_the_file_which_may_serve_several_commands(option_file: Path) -> None:
    option_file.write_text("port: 9\ntemperature: 1\n")
    environ = {"PENSTOCK_CONFIG": str(option_file)}
    assert resolve(ServeConfig, {}, environ, other_options=every_option)[0].port == 9
    assert resolve(ChatConfig, {}, environ, other_options=every_option)[0].temperature == 1.0


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("sql=/a, js=/b", ["sql=/a", "js=/b"]),
        ('{"name": "sql", "path": "/a"}', ['{"name": "sql", "path": "/a"}']),
        ('["sql=/a", {"name": "js", "path": "/b"}]', ["sql=/a", '{"name": "js", "path": "/b"}']),
        ("[gG]pt=/a", ["[gG]pt=/a"]),
    ],
)
def test_lists_in_the_environment(text: str, items: list[str]) -> None:
    environ = {"PENSTOCK_ENABLE_LORA": "true", "PENSTOCK_LORA_MODULES": text}
    config, _, _ = resolve(ServeConfig, {}, environ)
    assert config.lora_modules == items


def test_a_file_of_the_command_line_replaces_the_one_of_the_environment(option_file: Path) -> None:
    option_file.write_text("port: 9\n")
    config, *_ = resolve(ServeConfig, {}, {"PENSTOCK_CONFIG": "/nowhere"}, file=str(option_file))
    assert config.port == 9


@pytest.mark.parametrize(
    "text",
    [
        '["sesame","b"',
        '["sesame",]',
        ' [ "sesame" "b"]',
        "['sesame', 'b']",
        '["sesame", 1]',
        '[{"sesame": 1}',
    ],
)
def test_a_broken_array_in_a_variable_is_no_text(text: str) -> None:
    """As keys its parts would be valid, and nobody would know them."""
    with pytest.raises(ConfigError, match=r"^PENSTOCK_API_KEY: .*JSON array") as problem:
        resolve(ServeConfig, {}, {"PENSTOCK_API_KEY": text})
    assert "sesame" not in str(problem.value)


def test_an_address_in_a_variable_is_no_array() -> None:
    config = resolve(ServeConfig, {}, {"PENSTOCK_SERVED_MODEL_NAME": "[::1]:8000,b"}).config
    assert config.served_model_name == ["[::1]:8000", "b"]


@pytest.mark.parametrize("value", ["[[a]]", "[a, ~]", "{a: 1}"])
def test_an_option_takes_no_nested_values(option_file: Path, value: str) -> None:
    option_file.write_text(f"# names\nserved-model-name: {value}\n")
    with pytest.raises(ConfigError) as caught:
        resolve(ServeConfig, {}, {}, file=str(option_file))
    assert str(caught.value) == (
        f"{option_file}:2: served-model-name must be one value or a list of values "
        "(an object is written as JSON text, in quotes)"
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [("max_num_seq", "; did you mean max-num-seqs?"), ("<<", ""), ("temperature", "")],
)
def test_an_unknown_key_is_an_error_with_line_and_nearest_name(
    option_file: Path, key: str, hint: str
) -> None:
    option_file.write_text(f"port: 1\n{key}: 1\n")
    with pytest.raises(ConfigError) as caught:
        resolve(ServeConfig, {}, {}, file=str(option_file), other_options=every_option)
    assert str(caught.value) == f"{option_file}:2: unknown option {key.replace('_', '-')}{hint}"


def service_links(service: str) -> dict[str, str]:
    """What Kubernetes sets for a service with a TCP port 8080 named http."""
    port = f"{service}_PORT_8080_TCP"
    return {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8080",
        f"{service}_SERVICE_PORT_HTTP": "8080",
        f"{service}_PORT": "tcp://10.0.0.1:8080",
        port: "tcp://10.0.0.1:8080",
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "8080",
        f"{port}_ADDR": "10.0.0.1",
    }


@pytest.mark.parametrize("service", ["PENSTOCK_PICKER", "PENSTOCK_SERVE_2", "VLLM"])
@pytest.mark.parametrize("config", [ServeConfig, GatewayConfig, ChatConfig])
def test_variables_that_kubernetes_sets_for_services_are_ignored(config: type, service: str) -> None:
    links = service_links(service)
    assert resolve(config, {}, links, other_options=every_option) == (config(), {}, [])


@pytest.mark.parametrize("variable", ["PENSTOCK_PORT", "PENSTOCK_EXT_PROC_PORT"])
def test_a_service_named_as_an_option_does_not_set_it(variable: str) -> None:
    links = service_links(variable.removesuffix("_PORT"))
    config, origins, remarks = resolve(GatewayConfig, {}, links, other_options=every_option)
    assert (config, origins) == (GatewayConfig(), {})
    assert remarks == [
        f"note: {variable}=tcp://10.0.0.1:8080 is ignored: Kubernetes sets it for a service of that name"
    ]


@pytest.mark.parametrize("text", ["tcp:/10.0.0.1", "http://10.0.0.1:8080", "80 80"])
def test_a_port_that_kubernetes_would_not_set_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_PORT: .* is not valid for --port"):
        resolve(ServeConfig, {}, {"PENSTOCK_PORT": text})


def test_a_bad_secret_is_hidden() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ServeConfig, {"api_key": ["sesame", ""]}, {})
    assert HIDDEN in str(caught.value)
    assert "sesame" not in str(caught.value)


@option_group
class Pair:
    """A rule over two options."""

    low: Annotated[str | None, option("A text.", "One")] = None

    def __post_init__(self) -> None:
        raise ValueError("low is above high")


def test_a_rule_over_several_options_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="low is above high"):
        resolve(Pair, {}, {})


@given(st.integers(-10, 70_000))
def test_all_sources_agree_on_what_is_valid(number: int) -> None:
    accepted = []
    for arguments, environ in (({"port": str(number)}, {}), ({}, {"PENSTOCK_PORT": str(number)})):
        try:
            accepted.append(resolve(ServeConfig, arguments, environ)[0].port)
        except ConfigError:
            accepted.append(None)
    assert accepted == [number if 0 <= number <= 65535 else None] * 2
