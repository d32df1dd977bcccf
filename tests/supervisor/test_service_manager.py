"""States as a service manager receives them: by itself, from a real server, and from a real gateway."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.supervisor.service_manager import ServiceManager, ServiceState
from tests.supervisor.harness import PATIENCE_S, Serve


@pytest.fixture
def receiver(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The service manager's socket; processes that the test starts find it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(short_dir / "notify"))
        sock.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_dir / "notify"))
        yield sock


def until(receiver: socket.socket, line: str) -> list[str]:
    """The first lines of what comes, until one is ``line``."""
    found: list[str] = []
    while line not in found:
        found.append(receiver.recv(4096).decode().splitlines()[0])
    return found


def test_states_are_sent_once_and_children_do_not_inherit_the_socket(receiver: socket.socket) -> None:
    now = 0.0
    environ = {"NOTIFY_SOCKET": os.environ["NOTIFY_SOCKET"], "WATCHDOG_USEC": "3000000"}
    manager = ServiceManager(environ, lambda: now)
    assert environ == {}
    for state in (ServiceState.READY, ServiceState.READY, ServiceState.RELOADING, ServiceState.READY):
        manager.set_state(state)
    manager.set_status("engine 0: loading weights\nno second line")
    manager.beat()
    manager.beat()
    now = 1.0
    manager.beat()
    manager.set_state(ServiceState.STOPPING)
    assert until(receiver, "STOPPING=1") == [
        "READY=1",
        "RELOADING=1",
        "READY=1",
        "STATUS=engine 0: loading weights",
        "WATCHDOG=1",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nobody/there"}, {"NOTIFY_SOCKET": "@none"}])
def test_nobody_has_to_listen(environ: dict[str, str]) -> None:
    ServiceManager(environ).set_state(ServiceState.READY)


def test_another_process_is_watched() -> None:
    manager = ServiceManager({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})
    assert manager._interval_s is None


def test_a_server_is_ready_reloads_and_stops(serve: Serve, receiver: socket.socket) -> None:
    running = serve({"engine": ["slow"]})
    running.until_ready()
    first, *rest = until(receiver, "READY=1")
    assert first.startswith("STATUS=")
    assert "STATUS=serving" in rest
    running.process.send_signal(signal.SIGHUP)
    until(receiver, "RELOADING=1")
    until(receiver, "READY=1")
    running.process.send_signal(signal.SIGTERM)
    until(receiver, "STOPPING=1")
    assert running.exit_code() == 0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_gateway_is_ready_and_stops(receiver: socket.socket, log_format: str) -> None:
    command = ["gateway", "--endpoints", "http://127.0.0.1:9", "--port", "0", "--log-format", log_format]
    gateway = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *command], stderr=subprocess.DEVNULL
    )
    try:
        until(receiver, "READY=1")
        gateway.terminate()
        until(receiver, "STOPPING=1")
        assert gateway.wait(PATIENCE_S) == 0
    finally:
        gateway.kill()
        gateway.wait()
