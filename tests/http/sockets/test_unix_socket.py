from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError
from penstock.http.sockets.unix_socket import MAX_PATH_BYTES, unix_socket


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_has_the_permissions_asked_for_and_is_removed_at_the_end(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "s"
    with unix_socket(str(path), mode):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not path.exists()


def test_takes_over_what_a_dead_server_left(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen(1)
    with unix_socket(path, 0o600) as sock, socket.socket(socket.AF_UNIX) as client:
        sock.listen(1)
        client.connect(path)


def test_a_living_server_keeps_its_socket_also_when_it_is_busy(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with unix_socket(path, 0o600) as first, socket.socket(socket.AF_UNIX) as client:
        first.listen(0)
        with pytest.raises(StartupError, match=r"another server does; .*--uds"):
            unix_socket(path, 0o600).__enter__()
        client.setblocking(False)
        client.connect_ex(path)  # its backlog is full
        with pytest.raises(StartupError, match="another server does"):
            unix_socket(path, 0o600).__enter__()
        assert os.path.exists(path)


def test_a_file_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="no socket"):
        unix_socket(str(path), 0o600).__enter__()
    assert path.read_text() == "data"


def test_a_name_that_another_server_has_taken_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with unix_socket(path, 0o600), socket.socket(socket.AF_UNIX) as other:
        os.unlink(path)
        other.bind(path)
    assert os.path.exists(path)


def test_a_path_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot listen on .*absent/s: No such file"):
        unix_socket(str(tmp_path / "absent" / "s"), 0o600).__enter__()
    with pytest.raises(ConfigError, match=f"longer than the {MAX_PATH_BYTES} bytes"):
        unix_socket("/" + "x" * MAX_PATH_BYTES, 0o600).__enter__()
