"""One status: of a server's readings, of a gateway, of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.routes.response_schemas import REPLIES
from penstock.cli.main import main
from penstock.cli.status_reading import (
    EngineFigures,
    GatewayReading,
    ImageFigures,
    Reading,
    ServerFigures,
    read_samples,
    status_of,
)
from penstock.cli.status_text import line, tables
from tests.gateway.behaviours import good
from tests.gateway.processes import Upstream, eventually, gateway


def reading(
    tokens: int, *, at: float = 1000.0, started: float | None = 900.0, state: str = "ready"
) -> Reading:
    body: dict[str, Any] = {
        "version": "1.2.3",
        "models": ["m"],
        "time": at,
        "started": started,
        "engines": [
            {
                "engine": name,
                "state": kept,
                "host": "local",
                "running": running,
                "waiting": 2,
                "kv_used": 0.25,
                "prompt_tokens": 0,
                "tokens": count,
                "restarts": 0,
            }
            for name, kept, running, count in (("0", "ready", 3, tokens), ("1", state, 0, 0))
        ],
        "api_servers": [
            {
                "server": "0",
                "connections": 9,
                "streams": 3,
                "bytes_queued": 0,
                "tokens": tokens,
                "restarts": 1,
            }
        ],
        "requests": {"stop": 7, "error": 1},
        "rejected": {"429": 5, "503": 2},
        "restarts": 1,
    }
    return msgspec.convert(body, Reading)


def test_rates_and_loads_of_a_server() -> None:
    found = status_of(reading(100), reading(400, at=1002.0, state="down"))
    assert [row["tokens_per_s"] for row in found["engines"]] == [150, 0]
    assert found["api_servers"][0]["tokens_per_s"] == 150
    assert (found["errors"], found["restarts"], found["uptime_s"]) == (3, 1, 102)
    assert tables(found).splitlines() == [
        "m, Penstock 1.2.3, up for 1 min 42 s, 3 failed requests",
        "engine  state   host  running  waiting  kv used  tokens/s  prompt tokens/s  restarts",
        "0       ready  local        3        2   25.0 %     150.0              0.0         0",
        "1        down  local        0        2   25.0 %       0.0              0.0         0",
        "",
        "server  connections  streams  bytes queued  tokens/s  restarts",
        "0                 9        3             0     150.0         1",
    ]
    assert line(found) == (
        "1 of 2 engines ready, 3 running, 4 waiting, KV cache 25.0 %, 150.0 tokens/s, 3 errors, 1 restarts"
    )


def test_one_reading_has_no_rates_and_a_restart_no_negative_ones() -> None:
    once = status_of(reading(100), reading(100))
    assert "tokens_per_s" not in once["engines"][0]
    assert "tokens_per_s" not in status_of(reading(100), reading(0, at=1001.0, started=1000.5))["engines"][0]
    assert status_of(reading(100), reading(0, at=1001.0))["engines"][0]["tokens_per_s"] == 0


def speculating(drafts: int, at: float) -> Reading:
    """Engine 0 accepts a half of its drafts of four tokens."""
    made = reading(0, at=at)
    engine = made.engines[0]
    engine.drafts, engine.draft_tokens, engine.accepted_tokens = drafts, 4 * drafts, 2 * drafts
    return made


def test_acceptance_of_engines_that_speculate() -> None:
    earlier, later = speculating(10, 1000.0), speculating(30, 1002.0)
    later.engines[0].accepted_tokens += 8
    found = status_of(earlier, later)
    assert (found["acceptance"], found["tokens_per_step"]) == (0.6, 3.4)
    assert (found["engines"][0]["acceptance"], found["engines"][0]["tokens_per_step"]) == (0.6, 3.4)
    assert "acceptance" not in found["engines"][1]
    shown = tables(found).splitlines()[1:4]
    assert [line.split()[-4:] for line in shown] == [
        ["tokens/s", "acceptance", "tokens/step", "restarts"],
        ["60.0", "%", "3.40", "0"],
        ["0.0", "-", "-", "0"],
    ]
    assert "0.0 tokens/s, drafts accepted 60.0 %, 3.40 tokens/step, 3 errors" in line(found)


def test_without_drafts_between_two_readings_acceptance_is_that_since_the_start() -> None:
    once = speculating(10, 1000.0)
    for found in (status_of(once, once), status_of(once, speculating(10, 1002.0))):
        assert (found["acceptance"], found["tokens_per_step"]) == (0.5, 3.0)
    none = status_of(reading(1), reading(2, at=1002.0))
    assert "acceptance" not in none
    assert "drafts" not in line(none)


def test_names_of_a_server_cannot_control_the_terminal() -> None:
    hostile = reading(1)
    hostile.models = ["\x1b[2Jm"]
    hostile.engines[0].host = "\x1b]0;title\x07"
    shown = tables(status_of(hostile, hostile))
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_the_fields_are_those_of_the_api() -> None:
    for type, name in (
        (Reading, "Status"),
        (EngineFigures, "EngineStatus"),
        (ServerFigures, "ApiServerStatus"),
    ):
        assert set(type.__struct_fields__) <= set(REPLIES[name]["required"])


def test_images_are_shown_once_there_are_any() -> None:
    one, two = reading(100), reading(400, at=1002.0)
    assert not status_of(one, two)["images"]
    one.images = ImageFigures(remembered=1, decoded=1, workers=2)
    two.images = ImageFigures(remembered=5, found=2, decoded=3, refused=1, cache_bytes=30_000_000, workers=2)
    found = status_of(one, two)
    assert tables(found).splitlines()[-2:] == [
        "images  images/s  decoded/s   known  refused  cache mb  media workers",
        "10           4.0        1.0  70.0 %        1        30              2",
    ]
    assert "10 images (70.0 % known)" in line(found)


def test_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with Upstream(good) as server, gateway(server, options=("--scrape-interval", "0.05")) as front:
        assert front.complete().status_code == 200
        eventually(lambda: front.counts("endpoint_waiting") == {server.url: 0})
        assert main(["status", "--url", front.url + "/v1", "--json", "--interval", "0"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["kind"], found["in_flight"], found["requests"]) == ("gateway", 0, {"ok": 1})
        assert found["models"] == [
            {"model": "*", "pools": ["penstock"], "ready": 1, "endpoints": 1, "in_flight": 0, "queued": 0}
        ], "the server lists none"
        [endpoint] = found["endpoints"]
        assert endpoint == {
            "endpoint": server.url,
            "pool": "penstock",
            "up": 1,
            "in_flight": 0,
            "waiting": 0,
            "running": 0,
            "kv_used": 0,
            "state": "ready",
        }
        assert found["failures"] == []
        assert line(found) == "0 requests in flight, 1 of 1 endpoints up"
        assert main(["status", "--url", front.url, "--interval", "0"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "gateway, 0 requests in flight"
        assert lines[1].split() == ["model", "pools", "ready", "endpoints", "in", "flight", "queued"]
        assert lines[2].split() == ["*", "penstock", "1", "1", "0", "0"]
        assert lines[5].split() == [server.url, "penstock", "yes", "0", "0", "0", "0.0", "%", "ready"]
        assert lines[-1].split() == ["ok", "1"]


def test_a_gateway_with_pools_of_which_one_tells_no_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Upstream(good) as told, Upstream(good) as silent:
        silent.on_metrics = lambda call: call.reply(404, b"404 page not found")
        file = tmp_path / "endpoints.yaml"
        pools = [{"name": name, "endpoints": [each.url]} for name, each in (("a", told), ("b", silent))]
        file.write_text(json.dumps({"pools": pools}))
        with gateway(options=("--endpoints-file", str(file), "--scrape-interval", "0.05")) as front:
            eventually(lambda: set(front.counts("endpoint_waiting")) == {told.url})
            assert main(["status", "--url", front.url, "--interval", "0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = lines[next(at for at, words in enumerate(lines) if words[:1] == ["endpoint"]) :][:3]
    assert rows[0] == ["endpoint", "pool", "up", "in", "flight", "waiting", "running", "kv", "used", "state"]
    assert sorted(rows[1:], key=lambda row: row[1]) == [
        [told.url, "a", "yes", "0", "0", "0", "0.0", "%", "ready"],
        [silent.url, "b", "yes", "0", "-", "-", "-", "ready"],
    ]


def test_models_of_a_gateway() -> None:
    samples = read_samples(
        "penstock_gateway_requests_in_flight 6\n"
        'penstock_gateway_model_requests_in_flight{model="m"} 4\n'
        'penstock_gateway_model_requests_in_flight{model="n"} 0\n'
        'penstock_gateway_model_requests_in_flight{model="other"} 2\n'
        'penstock_gateway_model_queued_requests{model="m"} 2\n'
        'penstock_gateway_model_queued_requests{model="other"} 0\n'
        'penstock_gateway_model_endpoints{model="m",pool="a"} 2\n'
        'penstock_gateway_model_endpoints{model="m",pool="b"} 1\n'
        'penstock_gateway_model_endpoints{model="n",pool="b"} 1\n'
        'penstock_gateway_model_ready_endpoints{model="m",pool="a"} 1\n'
        'penstock_gateway_model_ready_endpoints{model="m",pool="b"} 1\n'
        'penstock_gateway_model_ready_endpoints{model="n",pool="b"} 0\n'
    )
    found = status_of(GatewayReading(samples), GatewayReading(samples))
    assert found["models"] == [
        {"model": "m", "pools": ["a", "b"], "ready": 2, "endpoints": 3, "in_flight": 4, "queued": 2},
        {"model": "n", "pools": ["b"], "ready": 0, "endpoints": 1, "in_flight": 0, "queued": 0},
        {"model": "other", "pools": [], "ready": 0, "endpoints": 0, "in_flight": 2, "queued": 0},
    ]
    assert tables(found).splitlines()[:3] == [
        "gateway, 6 requests in flight",
        "model  pools  ready  endpoints  in flight  queued",
        "m       a, b      2          3          4       2",
    ]


def test_another_server(capsys: pytest.CaptureFixture[str]) -> None:
    """It has metrics, but not these."""
    with Upstream(good) as server:
        assert main(["status", "--url", server.url, "--interval", "0"]) == 1
    assert "neither a Penstock gateway's nor server's" in capsys.readouterr().err
