"""The listening socket: bound once, by the supervisor or the gateway.

It stays open while API servers restart, so that no connection is refused meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.config.errors import ConfigError
from penstock.config.origins import Origins
from penstock.config.serve import ServeConfig
from penstock.exit_codes import StartupError
from penstock.http.sockets.unix_socket import unix_socket

if TYPE_CHECKING:  # imported when a port is taken
    import psutil

UNSENT_LOW_WATER_BYTES = 64 * 1024
"""Unsent bytes that the kernel buffers per connection (TCP_NOTSENT_LOWAT); more waits in the API server,
where ``--max-stream-backlog`` bounds it."""
BACKLOG = 4096
"""Maximum number of connections that wait to be accepted; Linux caps it at net.core.somaxconn, 4096 by
default."""
_COMMAND_LENGTH = 120


Address: TypeAlias = tuple[str, int] | str
"""The IP address and port that a socket is bound to, or the path of a Unix socket."""


class ListenSocket(NamedTuple):
    socket: socket.socket
    address: Address


@contextlib.contextmanager
def open_listener(config: ServeConfig, origins: Origins) -> Iterator[ListenSocket]:
    """Listen on the address of ``config`` until the end of the block.

    Raises ConfigError for an invalid address, StartupError for one that cannot be bound.
    """
    if config.uds is None:
        listener = listen(config.host, config.port)
        with listener.socket:
            yield listener
        return
    for field in ("host", "port"):
        if field in origins:
            raise ConfigError(f"--uds and {origins[field]} exclude each other: a unix socket has no {field}")
    with unix_socket(config.uds, int(config.uds_mode, 8)) as sock:
        sock.listen(BACKLOG)
        sock.setblocking(False)
        yield ListenSocket(sock, config.uds)


@contextlib.contextmanager
def reserve_port(host: str, port: int, flag: str) -> Iterator[int]:
    """Keep a port for child processes that listen on it with SO_REUSEPORT, until the end of the block;
    nothing listens on it here. Yields its number, which is another one if ``port`` is 0. ``flag``: its
    option.

    Raises ConfigError for an invalid address, StartupError for one that cannot be bound: other processes do
    not share it.
    """
    with listen(host, port, flag=flag).socket as sole:
        family, address = sole.family, sole.getsockname()
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise _bind_error(error, host, address[1], address[0], flag) from error
        yield address[1]


def listen(host: str, port: int, *, shared: bool = False, flag: str = "--port") -> ListenSocket:
    """Listen on ``host`` (a name, an IPv4 or IPv6 address; ``::`` includes IPv4) and ``port``.

    Port 0 takes a free one. ``shared``: other sockets may share the port (SO_REUSEPORT). ``flag``: the option
    of the port, beside which there is one of the host. Raises ConfigError for an invalid address,
    StartupError for one that cannot be bound.
    """
    family, address = _resolve(host, port, _host_flag(flag))
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        # Connections inherit it. Without it the kernel buffers megabytes for a client that does not read.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_LOW_WATER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(error, host, port, str(address[0]), flag) from error
    bound = sock.getsockname()
    return ListenSocket(sock, (bound[0], bound[1]))


def _host_flag(port_flag: str) -> str:
    return port_flag.removesuffix("port") + "host"


def check_host(host: str, port: int, flag: str = "--port") -> None:
    """Raise ConfigError if ``host`` is no address; nothing is bound. See :func:`listen`."""
    _resolve(host, port, _host_flag(flag))


def _resolve(host: str, port: int, flag: str) -> tuple[int, tuple[Any, ...]]:
    """Address family and address to bind; IPv4 for a name that has both, such as localhost."""
    if not host:
        allowed = "allowed: a name or an IP address, 0.0.0.0 for every one"
        raise ConfigError(f"{flag}: an empty address; {allowed}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"{flag} {host}: this is no address of this machine: {error}") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _bind_error(error: OSError, host: str, port: int, ip: str, flag: str) -> Exception:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return StartupError(
                f"cannot listen on {where}: it is in use by {_port_owner(ip, port)}; "
                f"end that process or choose another port with {flag} (0 takes a free one)"
            )
        case errno.EACCES:
            return StartupError(
                f"cannot listen on {where}: no permission; ports below 1024 take root or "
                f"CAP_NET_BIND_SERVICE, choose another one with {flag}"
            )
        case errno.EADDRNOTAVAIL:
            return ConfigError(
                f"{_host_flag(flag)} {host}: no interface of this machine has the address {ip}"
            )
        case _:
            return StartupError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}")


def _port_owner(ip: str, port: int) -> str:
    """Describe the process that holds the port, as far as the system shows it."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        connections = []
    # A listener on this address first, then one on any, then whoever has a connection from that port.
    holders = sorted(
        (c.status != psutil.CONN_LISTEN, c.laddr.ip != ip, c.pid)
        for c in connections
        if c.laddr and c.laddr.port == port and c.pid is not None
    )
    pid = holders[0][-1] if holders else None
    if pid is None:
        return "another process, which is not yours to see"
    try:
        return f"process {_describe(_owner(psutil.Process(pid), port))}"
    except psutil.Error:
        return f"process {pid}"


def _owner(process: psutil.Process, port: int) -> psutil.Process:
    """The furthest ancestor that has the port: children inherit its socket."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in process.parents():
            if not any(c.laddr and c.laddr.port == port for c in parent.net_connections(kind="tcp")):
                break
            process = parent
    return process


def _describe(process: psutil.Process) -> str:
    """``7 (python3: /usr/bin/python3 -m http.server)``, without the name if the command starts with it."""
    with process.oneshot():
        name = process.name()
        command = " ".join(part for part in process.cmdline() if part.strip()).strip()
    if len(command) > _COMMAND_LENGTH:
        command = command[: _COMMAND_LENGTH - 1] + "…"
    text = command if command.startswith(name) else f"{name}: {command}".removesuffix(": ")
    return f"{process.pid} ({text})"
