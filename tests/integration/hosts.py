"""Fleets over several hosts: addresses of loopback, or network namespaces of one machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from tests.integration.server import SYNTHETIC, Server

ENGINES = 3
_CLONE_NEWNET = 0x40000000


class Hosts:
    """How to start the hosts of one fleet: a head with engine 0, and others with engine 1 and engine 2."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.key = new_key(directory / "fleet.key")
        self.options = (*SYNTHETIC, "--synthetic-step-ms", "5", *options)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    def head(self, *options: str, address: str = "127.0.0.1", local: int = 1) -> Server:
        return self._serve(
            *("--coordinator", f"tcp://{address}:{self.port}"),
            *("--data-parallel-size-local", str(local), *options),
        )

    def host(self, rank: int, *options: str, head: str = "127.0.0.1", within: tuple[str, ...] = ()) -> Server:
        """A host with one engine."""
        return self._serve(
            *("--headless", "--coordinator", f"tcp://{head}:{self.port}"),
            *("--data-parallel-start-rank", str(rank), "--data-parallel-size-local", "1", *options),
            within=within,
        )

    def _serve(self, *options: str, within: tuple[str, ...] = ()) -> Server:
        fleet = ("--data-parallel-size", str(ENGINES), "--cluster-key-file", self.key)
        return Server(*self.options, *fleet, *options, directory=self.directory, within=within)


def new_key(path: Path) -> str:
    assert main(["keys", "cluster", str(path)]) == 0
    return str(path)


def engines(head: Server) -> list[dict[str, Any]]:
    reply = httpx.get(f"{head.url}/admin/engines", timeout=30).raise_for_status()
    listed: list[dict[str, Any]] = reply.json()["engines"]
    return listed


def up(head: Server) -> list[int]:
    """Ranks of the engines that are there."""
    return [engine["rank"] for engine in engines(head) if engine["up"]]


# -- network namespaces


class Network:
    """A private network with a host behind each of its links."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []

    def add(self) -> tuple[str, tuple[str, ...]]:
        """A new host: our address on the link to it, and the command to run something there."""
        number = len(self._holders)
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "\n"  # it is in its namespace
        within = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        far = f"far{number}"
        _run(
            "ip", "link", "add", _link(number), "type", "veth", "peer", "name", far, "netns", str(holder.pid)
        )
        _run("ip", "address", "add", f"10.0.{number}.1/24", "dev", _link(number))
        _run("ip", "link", "set", _link(number), "up")
        _run(*within, "ip", "address", "add", f"10.0.{number}.2/24", "dev", far)
        _run(*within, "ip", "link", "set", far, "up")
        _run(*within, "ip", "link", "set", "lo", "up")
        return f"10.0.{number}.1", within

    def cut(self, number: int) -> None:
        """Nothing passes the link to a host, and nobody is told."""
        _run("ip", "link", "set", _link(number), "down")

    def heal(self, number: int) -> None:
        _run("ip", "link", "set", _link(number), "up")

    def close(self) -> None:
        for holder in self._holders:
            holder.communicate()


def _link(number: int) -> str:
    return f"host{number}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def private_network() -> Iterator[Network]:
    """This thread, and all that it starts, has a network of its own meanwhile. Skips the test where the
    machine does not allow that."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} command")
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"network namespaces: {os.strerror(ctypes.get_errno())}")
        network = Network()
        try:
            _run("ip", "link", "set", "lo", "up")
            yield network
        finally:
            network.close()
            assert libc.setns(before, _CLONE_NEWNET) == 0
    finally:
        os.close(before)
