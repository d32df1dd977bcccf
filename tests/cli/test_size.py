"""``penstock size``, with the price of a token as given; measuring it is the host benchmark's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli.main import main


def sized(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["size", "--json", "--streams", "5000", "--cpu-us-per-token", "15", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_processes_follow_from_the_price_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    found = sized(capsys)
    assert found["tokens_per_s"] == 150_000
    assert (found["api_servers"], found["api_server_share"]) == (5, 0.45)
    assert (found["engines"], found["cores"], found["gateway_workers"]) == (20, 25, 0)
    assert found["open_files"] == 1_200
    assert sized(capsys, "--load", "0.9")["api_servers"] == 3
    assert sized(capsys, "--engine-tokens-per-second", "5000")["engines"] == 30


def test_a_gateway_and_http2(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = sized(capsys, "--gateway"), sized(capsys, "--gateway", "--http2")
    assert (one["gateway_workers"], two["gateway_workers"]) == (8, 4)
    assert two["api_server_bytes"] < one["api_server_bytes"]
    assert two["open_files"] < one["open_files"]
    assert sized(capsys, "--gateway", "--stream-interval", "10")["gateway_workers"] == 1


def test_the_table_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--cpu-us-per-token", "15", "--gateway"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("1,000 streams, 30,000 tokens/s, 30,000 events/s, chat over HTTP/1.1\n")
    for said in (
        "15.0 us per token, as given",
        "50% of a core",
        "not measured here",
        "engines' not included",
    ):
        assert said in table


def test_numbers_that_no_machine_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--cpu-us-per-token", "1e308"]) == 2
    assert main(["size", "--cpu-us-per-token", "15", "--engine-tokens-per-second", "1e-300"]) == 2
    assert "from 0.001 to 1000000000" in capsys.readouterr().err
