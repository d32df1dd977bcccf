"""One fleet on several hosts: joining, leaving, being cut off, and who is not let in."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.clients import Streams, texts_of
from tests.integration.hosts import Hosts, engines, new_key, private_network, up
from tests.integration.server import Server, wait_until

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "seed": 1}
PATIENCE_S = 90.0


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def until_up(head: Server, *ranks: int) -> None:
    wait_until(lambda: up(head) == list(ranks), PATIENCE_S, f"engines {ranks} being up, and no others")


def bodies(count: int) -> list[dict[str, Any]]:
    return [LONG | {"seed": seed} for seed in range(count)]


def ends(host: Server) -> str:
    """The log of a host that is not taken: it ends by itself."""
    try:
        assert host.process.wait(PATIENCE_S) == 1
    finally:
        host.end()
    return host.log


def test_an_engine_of_another_host_serves_and_may_be_killed(hosts: Hosts) -> None:
    with hosts.head() as head, hosts.host(1, "--engine-host", "127.0.0.2") as other:
        until_up(head, 0, 1)
        assert [engine["host"] for engine in engines(head)] == ["local", "127.0.0.2", ""]
        assert head.metric("penstock:engine_info", engine="1", host="127.0.0.2") == 1
        pinned = head.post("/v1/completions", LONG | {"max_tokens": 5}, **{"X-data-parallel-rank": "1"})
        assert pinned.json()["usage"]["completion_tokens"] == 5
        short = [body | {"max_tokens": 800} for body in bodies(6)]
        undisturbed = texts_of(head.url, short)
        with Streams(head.url, short) as streams:
            streams.until_each_has(3)
            other.process.kill()
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert head.metric("penstock:streams_interrupted_total", outcome="resumed") > 0


@pytest.mark.slow
def test_another_key_is_refused_by_name(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.head() as head:
        hosts.key = new_key(tmp_path / "other.key")
        assert "has another key (--cluster-key-file), or is no coordinator" in ends(hosts.host(1))
        assert "refused" in head.log
        assert "--cluster-key-file" in head.log
        assert head.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_name(hosts: Hosts) -> None:
    with hosts.head() as head, hosts.host(1):
        until_up(head, 0, 1)
        misfits = {
            ("--max-model-len", "512"): "its max_model_len is 512, the fleet's is 2048",
            ("--seed", "7"): "its --seed is 7, the fleet's is 0",
            ("--data-parallel-size", "4"): "its --data-parallel-size is 4, the fleet's is 3",
        }
        for options, reason in misfits.items():
            assert reason in ends(hosts.host(2, *options))
        assert "rank 1 is taken by the engine at tcp://127.0.0.1:" in ends(hosts.host(1))
        assert "rank 0 is one of the head's own, which are 0 to 0" in ends(hosts.host(0))
        assert up(head) == [0, 1]
        assert head.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_strangers_at_the_ports_break_nothing(hosts: Hosts) -> None:
    with hosts.head() as head, hosts.host(1, "--engine-host", "127.0.0.2"):
        until_up(head, 0, 1)
        ports = [("127.0.0.1", hosts.port), *engine_ports(head)]
        assert len(ports) == 2
        with Streams(head.url, bodies(4)) as streams:
            streams.until_each_has(3)
            for _ in range(20):
                for port in ports:
                    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000):
                        with socket.create_connection(port, timeout=PATIENCE_S) as stranger:
                            stranger.sendall(said)
            streams.until_all_ended()
        assert streams.failures == []
        assert up(head) == [0, 1]
        assert head.log.count("refused") <= 2


def engine_ports(head: Server) -> list[tuple[str, int]]:
    """Where engines of other hosts listen: what API servers are connected to there."""
    (api_server,) = head.children("api-server")
    ends = (each.raddr for each in api_server.net_connections("tcp") if each.raddr)
    return [("127.0.0.2", end.port) for end in ends if end.ip.endswith("127.0.0.2")]


@pytest.mark.slow
def test_hosts_come_and_go(hosts: Hosts) -> None:
    with hosts.head() as head:
        short, long = bodies(2)
        with hosts.host(1, "--drain-timeout", "60") as other:
            until_up(head, 0, 1)
            (undisturbed,) = texts_of(head.url, [long])
            head.post("/admin/engines/0/drain", {}).raise_for_status()
            with Streams(head.url, [long]) as streams:
                streams.until_each_has(3)
                other.process.send_signal(signal.SIGTERM)
                until_takes_none(head)
                head.post("/admin/engines/0/resume", {}).raise_for_status()
                assert texts_of(head.url, [short | {"max_tokens": 5}])
                streams.until_all_ended()
            assert (streams.failures, streams.texts) == ([], [undisturbed])
            assert other.process.wait(PATIENCE_S) == 0
        assert head.metric("penstock:streams_interrupted_total", outcome="resumed") == 0
        until_up(head, 0)
        with hosts.host(1, "--drain-timeout", "0") as other:
            until_up(head, 0, 1)
            with Streams(head.url, bodies(6)) as streams:
                streams.until_each_has(3)
                other.process.send_signal(signal.SIGTERM)
                assert other.process.wait(PATIENCE_S) == 0
                streams.until_all_ended()
            assert streams.failures == []
            assert head.metric("penstock:streams_interrupted_total", outcome="resumed") > 0


def until_takes_none(head: Server) -> None:
    ready = f"{head.url}/ready"
    wait_until(
        lambda: httpx.get(ready, timeout=30).status_code == 503, PATIENCE_S, "the engine refusing streams"
    )


@pytest.mark.slow
def test_the_head_may_have_no_engine_and_may_be_replaced(hosts: Hosts) -> None:
    head, other = hosts.head(local=0), hosts.host(1)  # neither is ready without the other
    with other:
        with head:
            until_up(head, 1)
            assert head.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
            (coordinator,) = head.children("coordinator")
            coordinator.kill()
            with hosts.host(2):
                until_up(head, 1, 2)
            until_up(head, 1)
            head.process.kill()
        with hosts.head(local=0) as successor:
            until_up(successor, 1)
            assert successor.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
        assert other.process.poll() is None


@pytest.mark.slow
def test_a_host_that_is_cut_off_comes_back(tmp_path: Path) -> None:
    with private_network() as network:
        hosts = Hosts(tmp_path)
        near, within = network.add()
        other_near, other_within = network.add()
        with (
            hosts.head(address="0.0.0.0") as head,
            hosts.host(1, head=near, within=within) as first,
            hosts.host(2, head=other_near, within=other_within) as second,
        ):
            until_up(head, 0, 1, 2)
            assert [engine["host"] for engine in engines(head)] == ["local", "10.0.0.2", "10.0.1.2"]
            undisturbed = texts_of(head.url, bodies(9))
            with Streams(head.url, bodies(9)) as streams:
                streams.until_each_has(3)
                network.cut(0)
                until_up(head, 0, 2)
                streams.until_all_ended()
            assert (streams.failures, streams.texts) == ([], undisturbed)
            with Streams(head.url, bodies(9)) as streams:
                streams.until_each_has(3)
                network.heal(0)
                until_up(head, 0, 1, 2)
                second.process.kill()
                streams.until_all_ended()
            assert (streams.failures, streams.texts) == ([], undisturbed)
            until_up(head, 0, 1)
            assert texts_of(head.url, bodies(9)) == undisturbed
            assert first.process.poll() is None
