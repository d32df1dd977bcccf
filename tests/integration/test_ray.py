"""Engines on a real Ray cluster of three raylets on this machine; needs Ray (make test-ray)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.exit_codes import EXIT_USAGE
from penstock.supervisor.startup.cluster_key import write_cluster_key
from tests.integration.clients import Streams
from tests.integration.server import SYNTHETIC, Server, wait_until

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")

pytestmark = pytest.mark.timeout(1800)
START_S = 400.0
"""Ray starts an interpreter for every process of the cluster: minutes on a busy machine."""
ENGINES = 4
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}


def started(make: Callable[[Any], None], attempts: int = 3) -> Any:
    """A cluster that ``make`` adds nodes to. Ray gives each 30 s to start: on a busy machine too few."""
    made = ray_cluster.Cluster()
    try:
        make(made)
    except Exception as error:  # a timeout is of this very class
        made.shutdown()
        if attempts == 1 or "timed out" not in str(error).lower():
            raise
        return started(make, attempts - 1)
    return made


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Three raylets with room for two engines each."""

    def three(made: Any) -> None:
        for _ in range(3):
            made.add_node(num_cpus=2)

    made = started(three)
    yield made
    made.shutdown()


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def options(address: str, directory: Path, engines: int = ENGINES) -> list[str]:
    key = directory / "fleet.key"
    if not key.exists():
        write_cluster_key(key)
    return [
        *SYNTHETIC,
        *("--synthetic-step-ms", "30"),
        *("--data-parallel-size", str(engines)),
        *("--data-parallel-backend", "ray"),
        *("--ray-address", address),
        *("--coordinator", f"tcp://127.0.0.1:{free_port()}"),
        *("--cluster-key-file", str(key)),
    ]


def by_raylet(title: str) -> dict[int, list[psutil.Process]]:
    """Processes of a title by the raylet of ours that they descend from."""
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(title):
                parents = process.parents()
                raylets = [parent.pid for parent in parents if parent.name() == "raylet"]
                if raylets and os.getpid() in [parent.pid for parent in parents]:
                    found.setdefault(raylets[0], []).append(process)
    return found


def engines_by_node() -> dict[int, list[psutil.Process]]:
    return by_raylet("penstock: engin")


def engines_up(server: Server, count: int) -> None:
    wait_until(lambda: server.metric("penstock:engine_up") == count, START_S, f"{count} engines being up")


def test_a_raylet_is_killed_and_its_engines_go_on_elsewhere(
    cluster: Any, server: Server, tmp_path: Path
) -> None:
    bodies = [LONG | {"seed": seed} for seed in range(16)]
    with Streams(server.url, bodies) as streams:
        streams.until_all_ended()
        undisturbed = streams.texts
    with Server(*options(cluster.address, tmp_path), directory=tmp_path, start_s=START_S) as placed:
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
    wait_until(lambda: not engines_by_node(), START_S, "the end of the engines")


def raylet_of(node: Any) -> int:
    """Its process id."""
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


# -- API servers on machines of the cluster


@pytest.fixture
def wide() -> Iterator[Any]:
    """Three raylets at addresses of their own: the first has room for engines, the others have none."""

    def three(made: Any) -> None:
        made.add_node(num_cpus=2)
        for number in (2, 3):
            add_machine(made, number)

    made = started(three)
    yield made
    made.shutdown()


def add_machine(cluster: Any, number: int) -> Any:
    return cluster.add_node(num_cpus=0, node_name=f"machine{number}", node_ip_address=f"127.0.0.{number}")


def serving_on(hosts: str, cluster: Any, directory: Path) -> Server:
    count = len(hosts.split(","))
    return Server(
        *options(cluster.address, directory, engines=2),
        *("--api-server-hosts", hosts, "--api-server-count", str(count), "--port", str(free_port())),
        *("--drain-timeout", "120"),
        directory=directory,
        start_s=START_S,
    )


def url_at(server: Server, address: str) -> str:
    return f"http://{address}:{httpx.URL(server.url).port}"


def answers(url: str) -> bool:
    try:
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=30)
    except httpx.TransportError:
        return False
    return reply.status_code == 200


def api_servers() -> dict[str, psutil.Process]:
    """Those on machines of the cluster, by the address that they listen on."""
    found = {}
    for processes in by_raylet("penstock: api-s").values():
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                listening = [each for each in process.net_connections("tcp") if each.status == "LISTEN"]
                found |= {each.laddr.ip: process for each in listening}
    return found


def kill_all_of(raylet: psutil.Process) -> None:
    """As when its machine is gone; alone, it would be survived by what it has started for a while."""
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_machine_with_an_api_server_is_lost_and_the_other_goes_on(
    wide: Any, server: Server, tmp_path: Path
) -> None:
    bodies = [LONG | {"seed": seed} for seed in range(8)]
    with Streams(server.url, bodies) as streams:
        streams.until_all_ended()
        undisturbed = streams.texts
    with serving_on("machine2,machine3", wide, tmp_path) as placed:
        engines_up(placed, 2)
        staying, leaving = url_at(placed, "127.0.0.2"), url_at(placed, "127.0.0.3")
        assert placed.url == staying
        lost = next(node for node in wide.worker_nodes if node.node_ip_address == "127.0.0.3")
        with Streams(staying, bodies) as kept, Streams(leaving, bodies) as cut:
            kept.until_each_has(5)
            cut.until_each_has(5)
            wait_until(lambda: placed.metric("penstock:streams") == 16, START_S, "all streams being counted")
            kill_all_of(psutil.Process(raylet_of(lost)))
            cut.until_all_ended()
            kept.until_all_ended()
        assert kept.failures == []
        assert kept.texts == undisturbed
        assert len(cut.failures) == 8
        assert answers(staying)
        wait_until(lambda: "waits for the machine machine3" in placed.log, START_S, "its being missed")
        wide.remove_node(lost)
        add_machine(wide, 3)
        wait_until(lambda: answers(leaving), START_S, "its being back")
        assert "api-server 1 is ready again" in placed.log
    wait_until(lambda: not by_raylet("penstock: api-s"), START_S, "the end of the API servers")


def test_api_servers_of_the_cluster_are_killed_replaced_and_drained(wide: Any, tmp_path: Path) -> None:
    with serving_on("head,machine2", wide, tmp_path) as placed:
        engines_up(placed, 2)
        here, there = placed.url, url_at(placed, "127.0.0.2")
        assert answers(here)
        first = api_servers()["127.0.0.2"]
        with Streams(here, [LONG] * 4) as others:
            others.until_each_has(5)
            first.kill()
            wait_until(lambda: answers(there), START_S, "a new API server in its place")
            others.until_all_ended()
        assert others.failures == []
        second = api_servers()["127.0.0.2"]

        for url, other in ((here, there), (there, here)):
            assert httpx.post(f"{url}/sleep?level=1", timeout=120).status_code == 200
            assert httpx.get(f"{other}/is_sleeping", timeout=30).json() == {"is_sleeping": True}
            assert httpx.post(f"{other}/wake_up", timeout=120).status_code == 200
            assert answers(url)

        with Streams(there, [LONG] * 4) as streams:
            streams.until_each_has(5)
            placed.process.send_signal(signal.SIGHUP)
            wait_until(lambda: not second.is_running(), START_S, "the old one's end")
            streams.until_all_ended()
        assert streams.failures == []
        assert answers(there)

        with Streams(there, [LONG] * 4) as streams, Streams(here, [LONG] * 4) as local:
            streams.until_each_has(5)
            local.until_each_has(5)
            placed.process.send_signal(signal.SIGTERM)
            streams.until_all_ended()
            local.until_all_ended()
        assert streams.failures == local.failures == []
        assert placed.process.wait(START_S) == 0


def test_machines_and_ports_that_cannot_be_had_are_named(wide: Any, tmp_path: Path) -> None:
    """At the first start it is final."""
    for hosts, said in (
        ("machine9", "--api-server-hosts machine9: the cluster has no such machine"),
        ("machine2", "cannot listen on 127.0.0.2"),
    ):
        with socket.create_server(("127.0.0.2", 0)) as taken:
            arguments = [*options(wide.address, tmp_path, engines=1), "--api-server-hosts", hosts]
            server = Server(*arguments, "--port", str(taken.getsockname()[1]), directory=tmp_path)
            assert server.process.wait(START_S) != 0
            server.end()
        assert said in server.log


def test_an_address_of_a_host_where_nothing_listens_is_refused(tmp_path: Path) -> None:
    elsewhere = ("--api-server-hosts", "machine2", "--port", "8000", "--host", "0.0.0.0")
    server = Server(*options("auto", tmp_path), *elsewhere, directory=tmp_path)
    assert server.process.wait(START_S) == EXIT_USAGE
    server.end()
    assert "--host: nothing listens here, head is not in --api-server-hosts" in server.log


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    """At the first start it is final."""
    address = f"127.0.0.1:{free_port()}"
    server = Server(*options(address, tmp_path), directory=tmp_path)
    assert server.process.wait(START_S) != 0
    server.end()
    assert f"--ray-address {address}" in server.log
