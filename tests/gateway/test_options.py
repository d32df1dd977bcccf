"""Options that cannot be run are refused by name, before anything listens."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.gateway.assembly import make_admission, name_of_pool, read_weights
from penstock.gateway.discovery.endpoints_file import EndpointSource
from tests.gateway.processes import WAIT_S, closed_port, gateway
from tests.gateway.workers.linked import gateway_of


def test_weights() -> None:
    assert read_weights("queue=2,slo=0.5", 1.0) == {"queue": 2.0, "slo": 0.5}
    assert read_weights("queue=0", None) == {"queue": 0.0}


@pytest.mark.parametrize(
    ("scorers", "slo", "problem"),
    [
        ("queu=1", None, "--scorers queu=1: there is no scorer 'queu', but queue, running"),
        ("queue", None, "--scorers queue: '' is not a number"),
        ("queue=-1", None, "the weight -1 is not allowed; it must be finite and at least 0"),
        ("queue=nan", None, "the weight nan is not allowed"),
        ("queue=1,queue=2", None, "--scorers queue=1,queue=2: queue is given twice"),
        ("queue=1,slo=1", None, "the scorer slo needs --ttft-slo"),
        ("queue=1", 0.5, "--ttft-slo 0.5: the scorer that uses it, slo, is not in --scorers"),
    ],
)
def test_weights_that_are_none(scorers: str, slo: float | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_weights(scorers, slo)


@pytest.mark.parametrize("url", ["http://a:99999", "http://a:x"])
def test_ports_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=f"--endpoints {url}: Port"):
        EndpointSource(GatewayConfig(endpoints=[url]))


@pytest.mark.parametrize("option", ["--port", "--ext-proc-port"])
def test_a_port_that_is_taken(option: str) -> None:
    """An error of one line, and the exit code of `penstock serve`."""
    if option == "--ext-proc-port":
        pytest.importorskip("grpc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["--port", "0", option, port] if option == "--ext-proc-port" else [option, port]
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "gateway", "--endpoints", "http://a", *arguments],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    assert done.returncode == 1
    assert port in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "penstock"),
        ({"kubernetes_pool": ["team/llama"]}, "llama"),
        ({"kubernetes_pool": ["llama", "qwen"]}, "penstock"),
    ],
)
def test_the_name_of_the_pool_in_metrics(options: dict[str, Any], name: str) -> None:
    assert name_of_pool(GatewayConfig(**options)) == name


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"fairness_header": "x-team"},
            "--fairness-header x-team: it has an effect only with --flow-control",
        ),
        ({"max_requests_per_endpoint": 3}, "--max-requests-per-endpoint 3: it has an effect only with"),
        (
            {"budget_store": "redis://user:pw"},
            r"--budget-store: the URL is not valid: check its port, and write special characters of its "
            r"password as %2F$",
        ),
    ],
)
def test_flow_control_that_is_none(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    if "budget_store" in options:
        pytest.importorskip("redis")

    async def check() -> None:
        async with gateway_of(tmp_path) as gateway:
            with pytest.raises(ConfigError, match=problem):
                make_admission(GatewayConfig(**options), lambda: 0.0, *gateway.link(0))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "off, anybody who can connect may use the gateway"), (("--api-key", "k"), "required")],
)
def test_the_start_says_who_may_use_the_gateway(options: tuple[str, ...], said: str) -> None:
    with gateway(closed_port(), options=options) as front:
        banner = [line.rstrip() for line in front.lines if line.startswith("  ")]
    assert f"  metrics    {front.url}/metrics" in banner
    assert f"  API key    {said}" in banner
