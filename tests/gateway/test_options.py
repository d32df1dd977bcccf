"""Options that cannot be run are refused by name, before anything listens."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.gateway import check_options
from penstock.gateway.assembly import name_of_pool
from penstock.gateway.discovery.endpoints_file import EndpointSource
from penstock.gateway.scorer_weights import read_weights
from tests.gateway.processes import WAIT_S, closed_port, gateway


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
    ("arguments", "problem"),
    [
        ((), "there are no endpoints: --endpoints http://127.0.0.1:8000"),
        (("--endpoints", "http://a:99999"), "--endpoints http://a:99999: Port out of range"),
        (("--endpoints-file", "/no"), "--endpoints-file /no: No such file"),
        (("--client-keys-file", "/no"), "--client-keys-file /no: No such file"),
        (("--client-keys-file", "{cut}"), "--client-keys-file {cut}: line 2: not valid YAML"),
        (
            ("--client-keys-file", "{issuers}"),
            "--client-keys-file {issuers}: issuer i: jwks /no: No such file",
        ),
        (("--api-key-file", "/no"), "--api-key-file /no: .*No such file"),
        (("--access-log-file", "/no/log"), "--access-log-file /no/log: No such file"),
        (("--access-log-file", "/"), "--access-log-file /: Is a directory"),
        (("--billing-file", "/no/bills"), "--billing-file /no/bills: No such file"),
        (("--scorers", "queu=1"), "--scorers queu=1: there is no scorer 'queu'"),
        (("--ttft-slo", "1"), "--ttft-slo 1: the scorer that uses it, slo, is not in --scorers"),
        (("--kv-events", "70000"), "--kv-events 70000: a port is between 1 and 65535"),
        (("--model-rewrite", "a=b:0"), "--model-rewrite a=b:0: all weights are 0"),
        (("--model-shadow", "a=b:2"), "--model-shadow a=b:2: the share 2 of b is not allowed"),
        (("--session-header", "x y"), "--session-header: 'x y' is not valid"),
        (("--flow-control", "--fairness-header", "x:"), "--fairness-header: 'x:' is not valid"),
        (("--otlp-endpoint", "http://a:99999"), "--otlp-endpoint http://a:99999: Port out of range"),
        (("--ssl-certfile", "/no"), "--ssl-certfile /no: .*No such file"),
        (("--ssl-certfile", "{cut}"), "--ssl-certfile {cut}: "),
        (("--endpoints", "https://a", "--upstream-ca-file", "{cut}"), "--upstream-ca-file {cut}: "),
        (("--host", "nope.invalid"), "--host nope.invalid: this is no address of this machine"),
        (("--queue-timeout", "1"), "--queue-timeout 1.0: needs --flow-control"),
    ],
)
def test_a_bad_option_is_refused_before_a_worker_starts(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, as of every command, and its exit code."""
    cut = tmp_path / "cut.yaml"
    cut.write_text("keys: [\n")
    cut.chmod(0o600)
    issuers = tmp_path / "issuers.yaml"
    issuers.write_text("issuers: [{issuer: i, audience: a, jwks: /no}]\n")
    issuers.chmod(0o600)
    given = ["--port", "0", *(each.format(cut=cut, issuers=issuers) for each in arguments)]
    if arguments and "--endpoints" not in arguments:
        given += ["--endpoints", "http://127.0.0.1:9"]
    assert main(["gateway", *given]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(f"penstock: error: {problem.format(cut=cut, issuers=issuers)}", line)


@pytest.mark.parametrize(
    ("arguments", "library", "problem"),
    [
        (
            ("--budget-store", "redis://user:pw", "--client-keys-file", "{keys}"),
            "redis",
            r"--budget-store: the URL is not valid: check its port, and write special characters of its "
            r"password as %2F$",
        ),
        (
            ("--kubernetes-pool", "a", "--kubernetes-config", "/no"),
            "kubernetes",
            "--kubernetes-config /no: No such file",
        ),
        (
            ("--ext-proc-port", "0", "--ext-proc-host", "0.0.0.0"),
            "grpc",
            "--ext-proc-port 0: whoever reaches",
        ),
    ],
)
def test_a_bad_option_of_a_library_is_refused_before_a_worker_starts(
    arguments: tuple[str, ...], library: str, problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library)
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: k}]\n")
    keys.chmod(0o600)
    given = [each.format(keys=keys) for each in arguments]
    assert main(["gateway", "--port", "0", "--endpoints", "http://a", *given]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(f"penstock: error: {problem}", line)


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"kubernetes_pool": ["a"]}, "kubernetes"),
        ({"ext_proc_port": 0}, "envoy"),
        ({"budget_store": "redis://h", "client_keys_file": "{keys}"}, "redis"),
    ],
)
def test_a_missing_library_is_named(
    options: dict[str, Any], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: k}]\n")
    filled = {
        name: value.format(keys=keys) if isinstance(value, str) else value for name, value in options.items()
    }
    monkeypatch.setattr(check_options, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"needs the package .*\[{extra}\]"):
        check_options.check_options(GatewayConfig(endpoints=["http://a"], **filled))


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "off, anybody who can connect may use the gateway"), (("--api-key", "k"), "required")],
)
def test_the_start_says_who_may_use_the_gateway(options: tuple[str, ...], said: str) -> None:
    with gateway(closed_port(), options=options) as front:
        banner = [line.rstrip() for line in front.lines if line.startswith("  ")]
    assert f"  metrics    {front.url}/metrics" in banner
    assert f"  API key    {said}" in banner
