"""The actor without Ray: a child process, and its control channel passed on."""

from __future__ import annotations

import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.config.serve import ServeConfig
from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL
from penstock.placement.process_actor import ProcessActor
from penstock.supervisor.startup.model_resolution import DEMO_DIR, resolve_model
from penstock.wire.control import (
    AcceptConnections,
    ChildReport,
    Launch,
    LineBuffer,
    ProcessFailed,
    Ready,
    Stop,
    decode_for_supervisor,
    encode,
)
from tests.launches import launch

SERVER = """
import select, socket, sys
from penstock.wire.channel import ControlChannel
from penstock.wire.control import AcceptConnections
control = ControlChannel(int(sys.argv[1]))
listener = socket.socket(fileno=control.launch.listen_fd)
control.ready({"port": listener.getsockname()[1], "address": listener.getsockname()[0]})
select.select([control], [], [])
assert control.receive() == [AcceptConnections()]
listener.setblocking(True)
connection, _ = listener.accept()
listener.close()
connection.sendall(b"served")
select.select([control], [], [])
"""
"""An API server that takes one connection."""
CHILD = """
import os, select, signal, sys
from penstock.wire.channel import ControlChannel
from penstock.wire.control import Stop
control = ControlChannel(int(sys.argv[1]))
launch = control.launch
assert os.path.isdir(launch.run_dir)
control.ready({"run_dir": launch.run_dir, "tokenizer": launch.tokenizer_dir})
select.select([control], [], [])
assert control.receive() == [Stop()]
%s
"""


def engine(model: str | None = None) -> Launch:
    config = ServeConfig(engine="synthetic", model=model)
    return launch("engine", "/of/another/machine", index=1, config=config, engine_count=2)


def api_server(port: int, epoch: int = 0) -> Launch:
    config = ServeConfig(engine="synthetic", port=port)
    return launch("api-server", "/of/another/machine", epoch=epoch, config=config)


def started(message: Launch, end: str = "") -> ProcessActor:
    host = ProcessActor()
    host.start(encode(message), [sys.executable, "-c", CHILD % end])
    return host


def reports_until_the_end(host: ProcessActor) -> tuple[list[ChildReport], int]:
    lines, buffer = [], LineBuffer()
    while (said := host.read()).returncode is None:
        lines += buffer.feed(said.data)
    return [decode_for_supervisor(line) for line in lines], said.returncode


def first_report(host: ProcessActor) -> ChildReport:
    (line,) = LineBuffer().feed(host.read().data)
    return decode_for_supervisor(line)


@pytest.mark.parametrize(
    ("end", "returncode"),
    [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_an_engine_from_its_launch_to_its_end(end: str, returncode: int) -> None:
    host = started(engine(), end)
    ready = first_report(host)
    assert isinstance(ready, Ready)
    assert Path(str(ready.info["tokenizer"])).is_dir()
    host.write(encode(Stop()))
    assert reports_until_the_end(host) == ([], returncode)
    assert not Path(str(ready.info["run_dir"])).exists()
    host.write(encode(Stop()))  # to nobody


def test_a_machine_without_the_model_says_so() -> None:
    host = started(engine(model="/no/such/model"))
    reports, returncode = reports_until_the_end(host)
    assert returncode == 3
    (failed,) = reports
    assert isinstance(failed, ProcessFailed)
    assert failed.fatal
    assert "/no/such/model" in failed.message


def test_a_child_that_cannot_be_started() -> None:
    host = ProcessActor()
    command: Sequence[str] = ["/no/such/interpreter"]
    host.start(encode(engine()), command)
    reports, _ = reports_until_the_end(host)
    assert isinstance(reports[0], ProcessFailed)
    assert "/no/such/interpreter" in reports[0].message


# -- API servers


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def serving(port: int) -> ProcessActor:
    host = ProcessActor()
    host.start(encode(api_server(port)), [sys.executable, "-c", SERVER], listen_on="127.0.0.1")
    ready = first_report(host)
    assert ready == Ready(info={"port": port, "address": "127.0.0.1"})
    host.write(encode(AcceptConnections()))
    return host


def test_a_machine_answers_until_its_api_server_may(port: int) -> None:
    host = ProcessActor()
    host.start(encode(api_server(port)), [sys.executable, "-c", SERVER], listen_on="127.0.0.1")
    assert isinstance(first_report(host), Ready)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as probe:
        probe.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = probe.recv(1000)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b'"engines_ready":null' in reply
    host.write(encode(AcceptConnections()))
    assert ask(port) == b"served"
    host.write(encode(Stop()))
    assert reports_until_the_end(host) == ([], 0)


def ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        return connection.recv(6)


def test_api_servers_share_a_port_and_what_one_closes_gets_nothing_more(port: int) -> None:
    """Also not by way of its host, which has opened it."""
    hosts = [serving(port), serving(port)]
    assert {ask(port), ask(port)} == {b"served"}  # each has had one, and the first was closed by then
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    for host in hosts:
        host.write(encode(Stop()))
        assert reports_until_the_end(host) == ([], 0)


@pytest.mark.parametrize(("epoch", "returncode"), [(0, EXIT_FATAL), (1, EXIT_FAILED)])
def test_a_port_of_somebody_else(port: int, epoch: int, returncode: int) -> None:
    """It may be free again, if it was ours."""
    with socket.create_server(("127.0.0.1", port)):
        host = ProcessActor()
        host.start(encode(api_server(port, epoch)), listen_on="127.0.0.1")
        reports, ended = reports_until_the_end(host)
    assert ended == returncode
    (failed,) = reports
    assert isinstance(failed, ProcessFailed)
    assert failed.fatal == (epoch == 0)
    assert f"cannot listen on 127.0.0.1:{port}" in failed.message


def test_a_machine_without_an_engine_needs_nothing_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.supervisor.startup.model_resolution._require_torch", lambda: 1 / 0)
    config = ServeConfig(model=str(DEMO_DIR), engine="torch")  # which has a tokenizer only
    assert resolve_model(config, "/run", for_engine=False).tokenizer_dir == str(DEMO_DIR)
