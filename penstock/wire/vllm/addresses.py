"""HOST:PORT of ``--attach``, and the address at which engines reach this host."""

from __future__ import annotations

import ipaddress
import socket

EVERYWHERE = ("0.0.0.0", "::")


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def bind_address(text: str) -> tuple[str, int]:
    """Host and port of ``text``, a name resolved to a number. Raises OSError."""
    host, port = split_address(text)
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port


def address_towards(host: str, peer: str) -> str:
    """The address at which ``peer`` reaches what listens on ``host`` here: of every address, the one on the
    route to it. Nothing is sent. Raises OSError."""
    if host not in EVERYWHERE:
        return host
    family = socket.AF_INET6 if ipaddress.ip_address(peer).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 1))
        return str(probe.getsockname()[0])
