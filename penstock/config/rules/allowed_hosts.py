"""Which hosts and addresses pictures may be fetched from (--allowed-media-domains).

An entry is a domain (``images.example.com``, that name alone), ``*.example.com`` or ``.example.com`` (names
below it, not itself), ``*`` (every name), an address or a network (``10.1.0.0/16``), each but a network also
with ``:PORT``. Without a port it means the scheme's own, 80 or 443.

Whatever a name resolves to must be a public address, or one that an entry with an address or a network names:
no name reaches the server's own network because its owner says so in DNS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

Address = IPv4Address | IPv6Address

_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_SCHEME_PORTS = (80, 443)


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(ip_network(part) for part in text.split())


# IANA's registries of special addresses; Python's own properties differ between its releases. The last of
# IPv4 is Azure's agent, at a public address; those of IPv6 are protocols with Teredo and ORCHID,
# documentation, 6to4, AS112 and documentation.
_NOT_PUBLIC = _networks(
    """0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24
    192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24
    198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3 168.63.129.16
    2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20"""
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""NAT64: the last 32 bits are the IPv4 address that is reached."""
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
# Link-local, multicast, and the metadata services of Azure, Alibaba, Oracle, AWS and Google: no network of an
# entry stands for them, their single address does.
_ONLY_BY_ITSELF = _networks(
    """0.0.0.0/8 169.254.0.0/16 224.0.0.0/4 255.255.255.255 168.63.129.16 100.100.100.200 192.0.0.192
    ::/128 fe80::/10 ff00::/8 fd00:ec2::/32 fd20:ce::254"""
)


class _Entry(NamedTuple):
    name: str
    """Lower case; with a leading dot: names below it; ``*``: all; empty: an address or a network."""
    network: IPv4Network | IPv6Network | None
    port: int | None


class AllowedHosts:
    """The entries of ``--allowed-media-domains``; without any, no host is allowed."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises ValueError that names a wrong entry."""
        self._entries = [_parse(text) for text in entries]

    def __bool__(self) -> bool:
        return bool(self._entries)

    def allows(self, host: str, port: int) -> bool:
        """Whether a URL may name ``host``: a name in lower case and ASCII, or an address without brackets."""
        address = address_of(host)
        for entry in self._entries:
            if not (port == entry.port if entry.port else port in _SCHEME_PORTS):
                continue
            if entry.network is not None:
                if address is not None and address in entry.network:
                    return True
            elif entry.name in ("*", host) or (entry.name[:1] == "." and host.endswith(entry.name)):
                return True
        return False

    def reaches(self, address: Address, port: int) -> bool:
        """Whether a connection may be made to ``address``, which an allowed host has."""
        target = _unwrapped(address)
        if is_public(target):
            return True
        by_itself = any(target in network for network in _ONLY_BY_ITSELF)
        return any(
            entry.network is not None
            and target in entry.network
            and entry.port in (None, port)
            and not (by_itself and entry.network.num_addresses > 1)
            for entry in self._entries
        )


def address_of(host: str) -> Address | None:
    """The address that ``host`` spells in its usual form; None: it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether ``address`` is one of the Internet's hosts: not private, shared, local, reserved or multicast,
    nor a form of IPv6 in which such a one of IPv4 is carried."""
    address = _unwrapped(address)
    if isinstance(address, IPv6Address) and (
        address not in _GLOBAL_UNICAST or (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP
    ):
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def _unwrapped(address: Address) -> Address:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _TRANSLATED:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _parse(text: str) -> _Entry:
    entry = text.strip().lower()
    bare = entry.removeprefix("[").removesuffix("]") if entry.endswith("]") else entry
    try:
        return _Entry("", ip_network(bare), None)
    except ValueError:
        pass
    host, colon, port = entry.rpartition(":")
    if not colon:
        host = entry
    elif not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise _wrong(text)
    number = int(port) if colon else None
    try:
        network = ip_network(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return _Entry(_name(host, text), None, number)
    if network.num_addresses > 1:
        raise _wrong(text)
    return _Entry("", network, number)


def _name(host: str, text: str) -> str:
    if host == "*":
        return host
    # Read the way that URLs are, and imported only where there are entries.
    import httpx

    below = "." if host.startswith((".", "*.")) else ""
    try:
        name = httpx.URL(
            scheme="http", host=host[2:] if host[:1] == "*" else host[len(below) :]
        ).raw_host.decode()
    except httpx.InvalidURL:
        raise _wrong(text) from None
    name = name.removesuffix(".")
    if not all(map(_LABEL.fullmatch, name.split("."))):
        raise _wrong(text)
    return below + name


def _wrong(text: str) -> ValueError:
    return ValueError(
        f"--allowed-media-domains {text!r}: it is none of DOMAIN, *.DOMAIN, *, ADDRESS (each also with "
        ":PORT) and NETWORK/BITS"
    )
