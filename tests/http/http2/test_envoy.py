"""A real Envoy in front of the server: HTTP/2 over one connection, for clients of either protocol."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from penstock.http.server import HttpServer
from tests.gateway.extproc.envoy import binary
from tests.http.http2.test_peers import EVENTS, LARGE, PATIENCE_S, with_server

pytestmark = pytest.mark.skipif(binary() is None, reason="there is no Envoy")
_TYPES = "type.googleapis.com/envoy.extensions"


def configuration(port: int) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "codec_type": "AUTO",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "server", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            }
        ],
    }
    options = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "admin": {"address": _address(0)},
        "static_resources": {
            "listeners": [
                {
                    "name": "clients",
                    "address": _address(0),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "server",
                    "type": "STATIC",
                    "connect_timeout": f"{PATIENCE_S}s",
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
                    },
                    "load_assignment": {
                        "cluster_name": "server",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}],
                    },
                }
            ],
        },
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@asynccontextmanager
async def envoy(port: int) -> AsyncIterator[str]:
    """The URL of one in front of the server at ``port``."""
    path = binary()
    assert path is not None
    with tempfile.TemporaryDirectory() as folder:
        admin = Path(folder, "admin")
        options = ("--admin-address-path", str(admin), "--disable-hot-restart", "--concurrency", "1")
        text = yaml.safe_dump(configuration(port))
        process = await asyncio.create_subprocess_exec(path, "--config-yaml", text, *options, "-l", "warning")
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                found = None
                while found is None:
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
                    if address := read(admin):
                        listeners = (await client.get(f"http://{address}/listeners")).text
                        found = re.search(r"clients::(\S+)", listeners)
            yield f"http://{found.group(1)}"
        finally:
            process.kill()
            await process.wait()


def test_envoy_shares_a_connection_between_clients_of_either_protocol() -> None:
    async def test(port: int, server: HttpServer) -> None:
        async with envoy(port) as url:
            for http2 in (False, True):
                async with httpx.AsyncClient(
                    http1=not http2, http2=http2, base_url=url, timeout=PATIENCE_S
                ) as client:
                    sizes = [1, 1000, 300_000, 1_000_000]
                    replies = await asyncio.gather(
                        *[client.post("/body", content=b"x" * size) for size in sizes],
                        *[client.get("/events") for _ in range(20)],
                        client.get("/large"),
                    )
                    assert [reply.json() for reply in replies[:4]] == [
                        {"size": size, "version": "2"} for size in sizes
                    ]
                    assert {reply.text.count("data: ") for reply in replies[4:-1]} == {EVENTS}
                    assert len(replies[-1].content) == LARGE
                    assert (await client.post("/early", content=b"x" * 2_000_000)).status_code == 413
                    assert server.connection_count == 1
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                async with client.stream("GET", "/forever") as reply:
                    assert await anext(reply.aiter_lines()) == "data: 0"
                gone = ""
                while gone != "1":  # Envoy sees meanwhile that its client's connection is closed
                    gone = (await client.get("/gone")).text
                assert server.connection_count == 1

    with_server(test)
