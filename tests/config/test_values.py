from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.bench import BenchEngineConfig
from penstock.config.client import ChatConfig
from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.introspect import Option, options_of
from penstock.config.origins import Origin
from penstock.config.serve import ServeConfig
from penstock.config.status import StatusConfig
from penstock.config.values import convert, parse_integer, parse_number

OPTIONS = {one.field: one for one in options_of(ServeConfig)}
HERE = Origin("file", "serve.yaml:3: key")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-12", -12),
        ("32k", 32_000),
        ("32K", 32_768),
        ("32Ki", 32_768),
        ("2m", 2_000_000),
        ("2M", 2 << 20),
        ("2Mi", 2 << 20),
        ("1g", 10**9),
        ("1G", 1 << 30),
        ("1.5Gi", 3 << 29),
        ("25.6k", 25_600),
    ],
)
def test_integers(text: str, value: int) -> None:
    assert parse_integer(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1.0", "1.0001k", "1ki", "1_000", "1e3", "0x10", " 1", "٣", "1kk", "1.k"]
)
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_integer(text)


@given(st.integers())
def test_every_integer_reads_as_itself(value: int) -> None:
    assert parse_integer(str(value)) == value


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "", ".", "1,5", "1_0", "x"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_number(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_reads_as_itself(value: float) -> None:
    assert parse_number(repr(value)) == value


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("port", "0", 0),
        ("port", "65535", 65535),
        ("strict_requests", "Yes", True),
        ("strict_requests", "off", False),
        ("dtype", "bfloat16", "bfloat16"),
        ("stream_interval", "auto", "auto"),
        ("stream_interval", "10", 10),
        ("gpu_memory_utilization", "1", 1.0),
        ("max_model_len", "32k", 32_000),
        ("served_model_name", ["a", "b"], ["a", "b"]),
        ("served_model_name", "a,b", ["a,b"]),
        ("revision", "0123", "0123"),
        ("max_model_len", None, None),
        ("synthetic_fault", "exit@7", "exit@7"),
    ],
)
def test_good_values(field: str, text: str | list[str] | None, value: object) -> None:
    assert convert(OPTIONS[field], HERE, text) == value


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        (
            "port",
            "65536",
            "serve.yaml:3: key: '65536' is not valid for --port, it takes an integer from 0 to 65535",
        ),
        ("port", "http", "'http' is not valid for --port, it takes an integer from 0 to 65535"),
        ("port", None, "null is not valid for --port"),
        ("port", ["1", "2"], "a list is not valid for --port"),
        ("port", "", "an empty text is not valid for --port"),
        ("model", "", "an empty text is not valid for MODEL, it takes text"),
        ("gpu_memory_utilization", "0", "it takes a number above 0 and at most 1"),
        ("dtype", "int8", "it takes auto, float32, bfloat16 or float16"),
        ("stream_interval", "0", "it takes an integer from 1 to 1024 or auto"),
        ("stream_interval", "Auto", "it takes an integer from 1 to 1024 or auto"),
        ("strict_requests", "2", "it takes true or false"),
        ("synthetic_fault", "boom@1", "it takes KIND@STEP, KIND one of error, exit, hang"),
        ("served_model_name", [], "an empty list is not valid for --served-model-name"),
        ("served_model_name", ["a", ""], "an empty text is not valid for --served-model-name"),
        ("model", "a\udcff", "the value is not valid UTF-8"),
        ("max_num_seqs", "9" * 5000, "it takes an integer from 1 to 65536"),
        ("kv_cache_memory", "2GB", "; suffixes are k, m, g (powers of 1000) and K, M, G or Ki, Mi, Gi"),
        ("seed", "9" * 40, "does not fit into 64 bits"),
    ],
)
def test_bad_values_name_place_option_value_and_what_is_allowed(
    field: str, text: str | list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(OPTIONS[field], HERE, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("serve.yaml:3: key: ")
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("field", "text", "meant"),
    [
        ("tool_call_parser", "hermess", "hermes"),
        ("dtype", "bfloat", "bfloat16"),
        ("stream_interval", "Auto", "auto"),
    ],
)
def test_a_misspelt_choice_names_the_one_that_was_meant(field: str, text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(OPTIONS[field], HERE, text)
    assert str(caught.value).endswith(f"; did you mean {meant}?")


def test_a_flag_is_not_named_twice() -> None:
    with pytest.raises(ConfigError, match=r"^--port: 'x' is not valid, it takes an integer from 0 to 65535$"):
        convert(OPTIONS["port"], Origin("command line", "--port"), "x")


def test_a_bad_secret_is_not_repeated() -> None:
    secret = msgspec.structs.replace(OPTIONS["synthetic_fault"], secret=True)
    with pytest.raises(ConfigError) as caught:
        convert(secret, HERE, "sesame")
    assert "sesame" not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize("text", ["key\n", "key\r\nx-admin: 1", "two words", "schlüssel"])
@pytest.mark.parametrize(
    ("config", "field"),
    [(GatewayConfig, "endpoint_api_key"), (ChatConfig, "api_key"), (StatusConfig, "api_key")],
)
def test_a_key_that_no_header_carries(config: type, field: str, text: str) -> None:
    """A newline would end the headers of requests, and what follows it would be another request."""
    [key] = [each for each in options_of(config) if each.field == field]
    with pytest.raises(ConfigError, match=r"it takes visible ASCII without spaces$") as caught:
        convert(key, HERE, text)
    assert text not in str(caught.value)


@pytest.mark.parametrize("config", [ServeConfig, GatewayConfig, ChatConfig, StatusConfig])
def test_no_pattern_lets_a_newline_follow(config: type) -> None:
    patterns = [each.pattern for one in options_of(config) for each in one.alternatives if each.pattern]
    assert [pattern for pattern in patterns if re.search(r"(?<!\\)\$", pattern)] == []


@pytest.mark.parametrize(
    ("field", "url", "shown"),
    [
        ("endpoints", "http://user:sesame@host:8000", "http://***@host:8000"),
        ("endpoints", "http://host:8000/?token=sesame", "http://host:8000/?***"),
        ("otlp_endpoint", "https://user:sesame@host", "https://***@host"),
        ("kv_events", "http://sesame@host=x", "http://***@host=x"),
    ],
)
def test_what_a_url_says_of_its_user_is_not_repeated(field: str, url: str, shown: str) -> None:
    [one] = [each for each in options_of(GatewayConfig) if each.field == field]
    with pytest.raises(ConfigError, match=f"{re.escape(repr(shown))} is not valid"):
        convert(one, HERE, [url] if one.many else url)


@given(st.sampled_from(list(OPTIONS.values())), st.text() | st.integers().map(str) | st.floats().map(str))
def test_any_text_gives_an_allowed_value_or_a_config_error(one: Option, text: str) -> None:
    try:
        value = convert(one, HERE, text)
    except ConfigError:
        return
    try:
        config = msgspec.convert({one.field: value}, ServeConfig)
    except msgspec.ValidationError as error:
        if str(error).startswith("--"):  # a rule over several options
            return
        raise
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServeConfig) == config


def test_numbers_of_a_list_may_be_separated_by_commas() -> None:
    [rows] = [one for one in options_of(BenchEngineConfig) if one.field == "rows"]
    assert convert(rows, HERE, ["1,2", " 4 "]) == [1, 2, 4]
    with pytest.raises(ConfigError, match="--rows"):
        convert(rows, HERE, ["1,"])


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:8000/v1"])
def test_an_endpoint_is_described_in_words(url: str) -> None:
    endpoints = next(each for each in options_of(GatewayConfig) if each.field == "endpoints")
    with pytest.raises(
        ConfigError, match="each http://HOST:PORT or https://HOST:PORT, without a path such as"
    ):
        convert(endpoints, HERE, [url])


@pytest.mark.parametrize("config", [ChatConfig, StatusConfig])
def test_a_url_is_described_in_words(config: type) -> None:
    url = next(each for each in options_of(config) if each.field == "url")
    with pytest.raises(
        ConfigError, match="it takes http://HOST:PORT or https://HOST:PORT, with or without /v1"
    ):
        convert(url, HERE, "localhost:8000")
