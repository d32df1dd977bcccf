"""Options that cannot be run are refused by name, before anything listens."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.gateway.process import EndpointSource, read_weights
from penstock.gateway.requests.model_rewrites import ModelRewrites
from tests.gateway.processes import WAIT_S


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


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a=b:1.2.3"], "--model-rewrite a=b:1.2.3: '1.2.3' is not a number"),
        (["a=b:0,c:0"], "--model-rewrite a=b:0,c:0: all weights are 0"),
        (["a=b", "a=c"], "--model-rewrite a=c: a is rewritten already"),
    ],
)
def test_rewrites_that_are_none(texts: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ModelRewrites(texts)


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
