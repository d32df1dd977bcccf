"""The gRPC server of the gateway, asked as Envoy's and Kubernetes' health checks ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.distribution import pip_install
from penstock.gateway.admission.envoy_certificates import certificate_files
from penstock.gateway.extproc.protobuf import HealthResponse, message
from penstock.gateway.extproc.server import stop_listening
from tests.certificates import Certificates, make
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
    request = message("grpc.health.v1.HealthCheckRequest")
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", request.SerializeToString, HealthResponse.FromString
    )
    return int(check(request(service=service), timeout=WAIT_S).status)


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


def secure_channel(port: int, trusted: Certificates, own: Certificates | None = None) -> grpc.Channel:
    authority = Path(trusted.authority).read_bytes()
    key = chain = None
    if own is not None:
        key, chain = Path(own.key).read_bytes(), Path(own.chain).read_bytes()
    return grpc.secure_channel(
        f"127.0.0.1:{port}", grpc.ssl_channel_credentials(authority, key, chain), options=[NO_SHARING]
    )


NO_SHARING = ("grpc.use_local_subchannel_pool", 1)
"""Each channel makes a connection of its own."""


def test_a_certificate_is_required_on_both_sides(
    upstream: Upstream, certificates: Certificates, tmp_path: Path
) -> None:
    """Also after the server's own has been renewed."""
    stranger, renewed = (make(_folder(tmp_path / name)) for name in ("stranger", "renewed"))
    used = {name: tmp_path / f"{name}.pem" for name in ("chain", "key")}
    for name, path in used.items():
        path.write_bytes(Path(getattr(certificates, name)).read_bytes())
    options = ("--ext-proc-port", "0", "--ext-proc-host", "0.0.0.0")
    options += ("--ext-proc-cert-file", str(used["chain"]), "--ext-proc-key-file", str(used["key"]))
    options += ("--ext-proc-client-ca-file", certificates.authority)
    with gateway(upstream, options=options) as front:
        port = ext_proc_port(front)

        def state(own: Certificates | None, trusted: Certificates = certificates) -> int:
            with secure_channel(port, trusted, own) as channel:
                return health(channel, "liveness")

        assert state(certificates) == SERVING
        for own in (None, stranger):
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                state(own)
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}", options=[NO_SHARING]) as channel,
            pytest.raises(grpc.RpcError, match="UNAVAILABLE"),
        ):
            health(channel, "liveness")

        used["chain"].write_bytes(Path(renewed.chain).read_bytes())
        assert state(certificates) == SERVING, "the key does not fit yet"
        used["key"].write_bytes(Path(renewed.key).read_bytes())
        assert state(certificates, renewed) == SERVING
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            state(certificates)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


PORT: dict[str, Any] = {"ext_proc_port": 0}
BOTH: dict[str, Any] = PORT | {"ext_proc_cert_file": "{chain}", "ext_proc_key_file": "{key}"}
OPEN = {"host": "0.0.0.0"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (PORT | {"ext_proc_cert_file": "c"}, "--ext-proc-cert-file c: needs --ext-proc-key-file"),
        (PORT | {"ext_proc_client_ca_file": "c"}, "--ext-proc-client-ca-file c: needs --ext-proc-cert-file"),
        ({"ext_proc_cert_file": "c", "ext_proc_key_file": "k"}, "c: needs --ext-proc-port"),
        ({"ext_proc_insecure": True}, "--ext-proc-insecure: needs --ext-proc-port"),
        (PORT | OPEN, "--ext-proc-port 0: .* 0.0.0.0 .*--ext-proc-client-ca-file.*--ext-proc-insecure"),
        (BOTH | OPEN, "--ext-proc-port 0: .* 0.0.0.0 .*--ext-proc-host 127.0.0.1"),
        (PORT | {"host": "my.name"}, "--ext-proc-port 0: .* my.name "),
        (PORT | {"ext_proc_host": "::"}, "--ext-proc-port 0: .* :: "),
        (
            BOTH | {"ext_proc_client_ca_file": "c", "ext_proc_insecure": True},
            "--ext-proc-insecure: does not go with --ext-proc-client-ca-file c",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GatewayConfig(**options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (BOTH | {"ext_proc_key_file": "/no"}, "--ext-proc-key-file /no: No such file"),
        (BOTH | {"ext_proc_key_file": "{other}"}, "--ext-proc-key-file .*other.pem: .*KEY_VALUES_MISMATCH"),
        (BOTH | {"ext_proc_client_ca_file": "{key}"}, "--ext-proc-client-ca-file .*key.pem: "),
    ],
)
def test_files_that_do_not_go_together(
    certificates: Certificates, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        certificate_files(_filled(options, certificates, make(tmp_path)))


@pytest.mark.parametrize(
    "options",
    [
        *({**PORT, "host": host} for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        PORT | OPEN | {"ext_proc_host": "127.0.0.1"},
        PORT | OPEN | {"ext_proc_insecure": True},
        BOTH | OPEN | {"ext_proc_insecure": True},
        BOTH | OPEN | {"ext_proc_client_ca_file": "{authority}"},
        OPEN,
    ],
)
def test_who_may_be_reached_by_whom(certificates: Certificates, options: dict[str, Any]) -> None:
    files = certificate_files(_filled(options, certificates))
    assert (files is not None) == ("ext_proc_cert_file" in options)


def _filled(
    options: dict[str, Any], certificates: Certificates, other: Certificates | None = None
) -> GatewayConfig:
    paths = certificates._asdict() | {"other": other and _named_other(other.key)}
    return GatewayConfig(
        **{
            name: value.format(**paths) if isinstance(value, str) else value
            for name, value in options.items()
        }
    )


def _named_other(key: str) -> str:
    return str(Path(key).rename(Path(key).with_name("other.pem")))


def test_without_grpc_the_error_names_the_extra(upstream: Upstream) -> None:
    arguments = ["gateway", "--port", "0", "--ext-proc-port", "0", "--endpoints", upstream.url]
    code = (
        "import sys; sys.modules['grpc'] = None; from penstock.cli.main import main;"
        f"sys.exit(main({json.dumps(arguments)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert pip_install("envoy") in done.stderr


def test_files_that_are_no_sockets_stay_as_they_are() -> None:
    reading, writing = os.pipe()
    try:
        before = len(os.listdir("/dev/fd"))
        stop_listening(1)
        assert len(os.listdir("/dev/fd")) == before
    finally:
        os.close(reading)
        os.close(writing)
