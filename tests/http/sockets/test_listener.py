from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock.config.errors import ConfigError
from penstock.config.origins import Origin
from penstock.config.serve import ServeConfig
from penstock.exit_codes import StartupError
from penstock.http.sockets import listener
from penstock.http.sockets.listener import listen, open_listener, reserve_port
from tests.supervisor.harness import PATIENCE_S


def test_port_0_takes_a_free_one_and_says_which() -> None:
    sock, (host, port) = listen("127.0.0.1", 0)
    with sock:
        assert host == "127.0.0.1"
        assert port > 0
        sock.settimeout(PATIENCE_S)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
            connection, _ = sock.accept()
            connection.close()


def test_a_reserved_port_is_for_those_that_share_it() -> None:
    with reserve_port("127.0.0.1", 0, "--ext-proc-port") as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        with listen("127.0.0.1", port, shared=True).socket, listen("127.0.0.1", port, shared=True).socket:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
            with (
                pytest.raises(StartupError, match="choose another port with --ext-proc-port"),
                reserve_port("127.0.0.1", port, "--ext-proc-port"),
            ):
                pass


def test_a_bad_host_is_named_with_its_own_option() -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with (
            pytest.raises(ConfigError, match=f"^--ext-proc-host {host}: "),
            reserve_port(host, 0, "--ext-proc-port"),
        ):
            pass


def test_the_socket_does_not_block_and_is_not_inherited_by_chance() -> None:
    sock, _ = listen("127.0.0.1", 0)
    with sock:
        assert not sock.getblocking()
        assert not sock.get_inheritable()


def test_a_name_that_has_an_ipv4_address_gets_it() -> None:
    sock, (host, _) = listen("localhost", 0)
    with sock:
        assert host == "127.0.0.1"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_and_every_address_of_both_kinds() -> None:
    sock, (host, port) = listen("::1", 0)
    with sock, socket.create_connection(("::1", port), timeout=PATIENCE_S):
        assert host == "::1"
    sock, (host, port) = listen("::", 0)
    with sock, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
        assert host == "::"


def test_a_port_that_was_just_used_can_be_taken_again() -> None:
    sock, (_, port) = listen("127.0.0.1", 0)
    with sock, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        sock.settimeout(PATIENCE_S)
        connection, _ = sock.accept()
        connection.close()  # this side closes first: its address stays in TIME_WAIT
        assert client.recv(1) == b""
    again, _ = listen("127.0.0.1", port)
    again.close()


def test_a_port_in_use_names_address_process_and_command() -> None:
    sock, (_, port) = listen("127.0.0.1", 0)
    with sock, pytest.raises(StartupError) as caught:
        listen("127.0.0.1", port)
    message = str(caught.value)
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert f"process {os.getpid()} (" in message
    assert psutil.Process().cmdline()[0] in message
    assert "--port" in message


def test_a_holder_that_may_not_be_seen_is_said_to_be_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refuse)
    sock, (_, port) = listen("127.0.0.1", 0)
    with sock, pytest.raises(StartupError, match="in use by another process, which is not yours to see"):
        listen("127.0.0.1", port)


def test_of_several_holders_the_listener_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(status: str, pid: int | None, port: int = 7) -> SimpleNamespace:
        return SimpleNamespace(status=status, pid=pid, laddr=SimpleNamespace(ip="0.0.0.0", port=port))

    found = [
        connection(psutil.CONN_ESTABLISHED, 999_999_901),
        connection(psutil.CONN_LISTEN, None),
        connection(psutil.CONN_LISTEN, 999_999_902),
        connection(psutil.CONN_LISTEN, 999_999_903, port=8),
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: found)
    assert listener._port_owner("127.0.0.1", 7) == "process 999999902"


def test_a_port_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:80: no permission; ports below 1024"):
        listen("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "999.1.1.1", "a" * 300, "x..y"])
def test_a_host_that_cannot_be_resolved(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen(host, 0)


def test_an_empty_host_is_not_every_address() -> None:
    with pytest.raises(ConfigError, match=r"--host: an empty address.*0\.0\.0\.0"):
        listen("", 0)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: no interface"):  # RFC 5737
        listen("192.0.2.1", 0)


def test_listens_where_the_options_say_until_the_end_of_the_block(tmp_path: Path) -> None:
    with open_listener(ServeConfig(port=0), {}) as (sock, address):
        assert isinstance(address, tuple)
        socket.create_connection(address, timeout=PATIENCE_S).close()
    assert sock.fileno() == -1
    path = str(tmp_path / "s")
    with open_listener(ServeConfig(uds=path), {}) as (sock, address), socket.socket(socket.AF_UNIX) as client:
        assert address == path
        assert not sock.getblocking()
        client.connect(path)
    assert sock.fileno() == -1
    assert not os.path.exists(path)


@pytest.mark.parametrize("field", ["host", "port"])
def test_a_unix_socket_excludes_host_and_port(tmp_path: Path, field: str) -> None:
    path = str(tmp_path / "s")
    origins = {field: Origin("environment", f"PENSTOCK_{field.upper()}")}
    with pytest.raises(ConfigError, match=f"--uds and PENSTOCK_{field.upper()} exclude each other"):
        open_listener(ServeConfig(uds=path), origins).__enter__()
    assert not os.path.exists(path)
