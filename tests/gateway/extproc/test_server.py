"""The gRPC server of the gateway, asked as Envoy's and Kubernetes' health checks ask."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme

from penstock.gateway.extproc.protobuf import HealthRequest, HealthResponse
from tests.gateway.behaviours import good
from tests.gateway.extproc.envoy import ext_proc_port
from tests.gateway.processes import WAIT_S, Upstream, closed_port, eventually, gateway

SERVING, NOT_SERVING = 1, 2
PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


def health(channel: grpc.Channel, service: str) -> int:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", HealthRequest.SerializeToString, HealthResponse.FromString
    )
    return int(check(HealthRequest(service=service), timeout=WAIT_S).status)


def test_health(upstream: Upstream) -> None:
    with (
        gateway(upstream, options=("--ext-proc-port", "0")) as front,
        grpc.insecure_channel(f"127.0.0.1:{ext_proc_port(front)}") as channel,
    ):
        assert {health(channel, name) for name in ("", "liveness", "readiness", PROCESSOR)} == {SERVING}
        with pytest.raises(grpc.RpcError, match="there is no service 'other'"):
            health(channel, "other")


def test_health_without_endpoints() -> None:
    options = ("--ext-proc-port", "0", "--scrape-interval", "0.05")
    with (
        gateway(closed_port(), options=options) as front,
        grpc.insecure_channel(f"127.0.0.1:{ext_proc_port(front)}") as channel,
    ):
        eventually(lambda: health(channel, PROCESSOR) == NOT_SERVING)
        assert health(channel, "liveness") == SERVING


def test_tls(upstream: Upstream, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    files = ("--ext-proc-cert-file", str(cert), "--ext-proc-key-file", str(key))
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with (
        gateway(upstream, options=("--ext-proc-port", "0", *files)) as front,
        grpc.secure_channel(
            f"127.0.0.1:{ext_proc_port(front)}",
            credentials,
            options=[("grpc.ssl_target_name_override", "localhost")],
        ) as channel,
    ):
        assert health(channel, "liveness") == SERVING


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ext-proc-port", "0", "--ext-proc-cert-file", "c.pem"], "--ext-proc-key-file is missing"),
        (["--ext-proc-cert-file", "c", "--ext-proc-key-file", "k"], "there is no --ext-proc-port"),
        (
            ["--ext-proc-port", "0", "--ext-proc-cert-file", "c", "--ext-proc-key-file", "/no"],
            "--ext-proc-key-file /no: No such file",
        ),
    ],
)
def test_certificate_and_key(options: list[str], problem: str, upstream: Upstream) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "gateway", "--port", "0"]
    done = subprocess.run(
        [*command, "--endpoints", upstream.url, *options], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode != 0
    assert problem in done.stderr


def test_without_grpc_the_error_names_the_extra(upstream: Upstream) -> None:
    arguments = ["gateway", "--port", "0", "--ext-proc-port", "0", "--endpoints", upstream.url]
    code = (
        "import sys; sys.modules['grpc'] = None; from penstock.cli.main import main;"
        f"sys.exit(main({json.dumps(arguments)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert 'pip install "penstock-llm[envoy]"' in done.stderr
