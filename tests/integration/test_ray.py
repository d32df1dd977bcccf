"""Engines on a real Ray cluster of three raylets on this machine; needs Ray (make test-ray)."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.supervisor.cluster import write_key

from .clients import Streams
from .server import SYNTHETIC, Server, wait_until

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")

pytestmark = pytest.mark.timeout(400)
ENGINES = 4
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Three raylets with room for two engines each."""
    made = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for _ in range(2):
            made.add_node(num_cpus=2)
        yield made
    finally:
        made.shutdown()


def options(address: str, directory: Path) -> list[str]:
    key = directory / "fleet.key"
    write_key(key)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        *SYNTHETIC,
        *("--synthetic-step-ms", "10"),
        *("--data-parallel-size", str(ENGINES)),
        *("--data-parallel-backend", "ray"),
        *("--ray-address", address),
        *("--coordinator", f"tcp://127.0.0.1:{port}"),
        *("--cluster-key-file", str(key)),
    ]


def engines_by_node() -> dict[int, list[psutil.Process]]:
    """Engine processes by the raylet that they descend from."""
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if not process.name().startswith("penstock: engin"):
                continue
            raylets = [parent.pid for parent in process.parents() if parent.name() == "raylet"]
        except psutil.NoSuchProcess:
            continue
        if raylets:
            found.setdefault(raylets[0], []).append(process)
    return found


def engines_up(server: Server, count: int) -> None:
    wait_until(lambda: server.metric("penstock:engine_up") == count, 120, f"{count} engines being up")


def test_a_raylet_is_killed_and_its_engines_go_on_elsewhere(
    cluster: Any, server: Server, tmp_path: Path
) -> None:
    bodies = [LONG | {"seed": seed} for seed in range(16)]
    with Streams(server.url, bodies) as streams:
        streams.until_all_ended()
        undisturbed = streams.texts
    with Server(*options(cluster.address, tmp_path), directory=tmp_path) as placed:
        engines_up(placed, ENGINES)
        nodes = engines_by_node()
        assert len(nodes) > 1
        assert sum(map(len, nodes.values())) == ENGINES
        lost = next(node for node in cluster.worker_nodes if raylet_of(node) in nodes)
        with Streams(placed.url, bodies) as streams:
            streams.until_each_has(5)
            psutil.Process(raylet_of(lost)).kill()
            streams.until_all_ended()
        assert streams.failures == []
        assert streams.texts == undisturbed
        engines_up(placed, ENGINES)
        assert raylet_of(lost) not in engines_by_node()
        assert "engine 3" in placed.log
    wait_until(lambda: not engines_by_node(), 30, "the end of the engines")


def raylet_of(node: Any) -> int:
    """Its process id."""
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    """At the first start it is final."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"

        server = Server(*options(address, tmp_path), directory=tmp_path)
        assert server.process.wait(120) != 0
        server.end()
    assert f"--ray-address {address}" in server.log
