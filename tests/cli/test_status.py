from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from penstock.cli import status
from penstock.cli.main import main
from tests.gateway.behaviours import good
from tests.gateway.processes import Upstream, gateway

DOCS = Path(penstock.__file__).parents[1] / "docs" / "metrics.md"
SERVER = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m",engine="0"}} 3
vllm:num_requests_running{{model_name="m",engine="1"}} 4
vllm:num_requests_waiting{{model_name="m",engine="0"}} 0
vllm:num_requests_waiting{{model_name="m",engine="1"}} 2
vllm:kv_cache_usage_perc{{model_name="m",engine="0"}} 0.25
penstock:engine_info{{model_name="m",engine="0",host="local"}} 1
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{model_name="m",engine="0"}} {tokens}
penstock:connections{{server="0"}} 9
penstock:tokens_delivered_total{{server="0"}} {tokens}
"""


def samples(tokens: int) -> status.Samples:
    return status.read_samples(SERVER.format(tokens=tokens))


def test_rates_and_loads_of_a_server() -> None:
    found = status.status_of(samples(100), samples(400), 2.0)
    assert found == {
        "kind": "server",
        "engines": [
            {
                "engine": "0",
                "host": "local",
                "running": 3,
                "waiting": 0,
                "kv_used": 0.25,
                "prompt_tokens_per_s": 0,
                "tokens_per_s": 150,
            },
            {
                "engine": "1",
                "host": None,
                "running": 4,
                "waiting": 2,
                "prompt_tokens_per_s": 0,
                "tokens_per_s": 0,
            },
        ],
        "api_servers": [{"server": "0", "connections": 9, "tokens_per_s": 150}],
    }
    assert status.tables(found).splitlines() == [
        "server",
        "engine   host  running  waiting  kv used  prompt tokens/s  tokens/s",
        "0       local        3        0   25.0 %              0.0     150.0",
        "1           -        4        2        -              0.0       0.0",
        "",
        "server  connections  tokens/s",
        "0                 9     150.0",
    ]


def test_one_reading_has_no_rates_and_a_restart_no_negative_ones() -> None:
    once = status.status_of(samples(100), samples(100), 0.0)
    assert once is not None
    assert "tokens_per_s" not in once["engines"][0]
    restarted = status.status_of(samples(100), samples(0), 1.0)
    assert restarted is not None
    assert restarted["engines"][0]["tokens_per_s"] == 0


def test_the_names_are_those_of_the_documentation() -> None:
    documented = DOCS.read_text()
    for names in (status._ENGINE_GAUGES, status._ENGINE_RATES, status._SERVER_GAUGES, status._SERVER_RATES):
        for name in names.values():
            assert f"`{name.removesuffix('_total')}`" in documented


def test_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with Upstream(good) as server, gateway(server) as front:
        assert front.complete().status_code == 200
        assert main(["status", "--url", front.url + "/v1", "--json", "--interval", "0"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["kind"], found["in_flight"], found["requests"]) == ("gateway", 0, {"ok": 1})
        [endpoint] = found["endpoints"]
        assert endpoint == {
            "endpoint": server.url,
            "up": 1,
            "in_flight": 0,
            "waiting": 0,
            "running": 0,
            "kv_used": 0,
        }
        assert main(["status", "--url", front.url, "--interval", "0"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "gateway, 0 requests in flight"
        assert lines[2].split() == [server.url, "yes", "0", "0", "0", "0.0", "%"]
        assert lines[-1].split() == ["ok", "1"]


def test_another_server(capsys: pytest.CaptureFixture[str]) -> None:
    """It has metrics, but not these."""
    with Upstream(good) as server:
        assert main(["status", "--url", server.url, "--interval", "0"]) == 1
    assert "neither a Penstock gateway's nor server's" in capsys.readouterr().err
