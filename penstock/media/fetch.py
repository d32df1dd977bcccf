"""Fetches a picture by its URL, from where the operator allows and nowhere else.

A host is checked by its name before it is resolved, and by every address that the name has; the connection is
made to an address that was checked, so that a name server that answers differently later changes nothing.
Redirects are followed here, each checked like the first URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import cache
from ipaddress import ip_address
from typing import NamedTuple

import h11
import httpx

from penstock import __version__
from penstock.config.rules.allowed_hosts import Address, AllowedHosts, address_of
from penstock.media.local_files import read_local
from penstock.media.refused import Refused

MAX_REDIRECTS = 5
MAX_ADDRESSES = 64
"""Addresses of one name."""
MAX_HEAD_BYTES = 1 << 16
MAX_OVERHEAD_BYTES = 1 << 18
"""Bytes of one reply besides its body: heads and informational replies."""
_TRIED = 3
"""Addresses that are tried, one after the other."""
_READ_BYTES = 1 << 15
"""Bytes that are parsed at a time."""
_HEADERS = (
    (b"User-Agent", f"penstock/{__version__}".encode()),
    (b"Accept", b"image/png, image/jpeg, image/webp, image/gif, image/bmp"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
)
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a name; raises OSError."""


class FetchPolicy(NamedTuple):
    """Where pictures may be fetched from; without hosts and directory, from nowhere."""

    hosts: AllowedHosts = AllowedHosts()
    local_path: str = ""
    """Directory of file: URLs; empty: none are read."""
    max_bytes: int = 32 << 20
    seconds: float = 10.0
    """For all of one picture: names, redirects, connections and the body."""


async def resolve_by_system(name: str, port: int) -> list[str]:
    """Ask the system's resolver, in a thread."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def fetch(url: str, policy: FetchPolicy, resolve: Resolve = resolve_by_system) -> bytes:
    """The bytes behind an http:, https: or file: URL. Raises Refused."""
    try:
        async with asyncio.timeout(policy.seconds):
            if url[:5].lower() != "file:":
                return await _follow(url, policy, resolve)
            if not policy.local_path:
                raise Refused("forbidden", "file: URLs need --allowed-local-media-path, which is not set")
            return await asyncio.to_thread(read_local, url, policy.local_path, policy.max_bytes)
    except TimeoutError:
        raise Refused("timeout", f"the picture did not come within {policy.seconds:g} s") from None


async def _follow(given: str, policy: FetchPolicy, resolve: Resolve) -> bytes:
    url = _checked(given, policy.hosts)
    for _ in range(MAX_REDIRECTS + 1):
        try:
            found = await _get(url, policy, resolve)
        except OSError as error:
            # Also a name that does not resolve, and a certificate that is not the host's.
            raise Refused("unreachable", f"{_shown(url)} cannot be reached: {_reason(error)}") from None
        except h11.ProtocolError:
            raise Refused("unreachable", f"{_shown(url)} does not answer as HTTP servers do") from None
        if isinstance(found, bytes):
            return found
        target = _checked(found, policy.hosts, url)
        if url.scheme == "https" and target.scheme != "https":
            raise Refused("forbidden", f"{_shown(url)} redirects from https to http")
        url = target
    raise Refused(
        "unreachable", f"{_shown(_checked(given, policy.hosts))} redirects more than {MAX_REDIRECTS} times"
    )


def _checked(given: str, hosts: AllowedHosts, base: httpx.URL | None = None) -> httpx.URL:
    """The URL, if its host is allowed. It is parsed once, so that the host that is checked is the one that is
    resolved, connected to and named in TLS and in the head. Raises Refused."""
    place = "the URL" if base is None else f"{_shown(base)} redirects to a URL that"
    try:
        url = httpx.URL(given) if base is None else base.join(given)
        host = url.raw_host.decode().removesuffix(".")
        port = url.port or _PORTS.get(url.scheme, 0)
        url = url.copy_with(host=host) if host else url
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise Refused("invalid", f"{place} cannot be read") from None
    if url.scheme not in _PORTS or not host:
        raise Refused("invalid", f"{place} is none of data:, http: and https: URLs")
    if url.userinfo:
        raise Refused("invalid", f"{place} has credentials, which are not sent")
    if not hosts:
        raise Refused("forbidden", "pictures are fetched only with --allowed-media-domains, which is not set")
    if not hosts.allows(host, port):
        raise Refused(
            "forbidden", f"{place} is at {_shown(url, port)}, which is not one of --allowed-media-domains"
        )
    return url


async def _get(url: httpx.URL, policy: FetchPolicy, resolve: Resolve) -> bytes | str:
    """The body, or where the host redirects to. Raises Refused, OSError and h11.ProtocolError."""
    reader, writer = await _connect(url, policy, resolve)
    try:
        return await _exchange(url, reader, writer, policy.max_bytes)
    finally:
        writer.transport.abort()


async def _connect(
    url: httpx.URL, policy: FetchPolicy, resolve: Resolve
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to one of the host's addresses, all of which are checked."""
    host, port = url.raw_host.decode(), url.port or _PORTS[url.scheme]
    literal = address_of(host)
    addresses: list[Address] = [] if literal is None else [literal]
    if literal is None:
        addresses += (ip_address(text) for text in dict.fromkeys(await resolve(host, port)))
    if not 0 < len(addresses) <= MAX_ADDRESSES:
        raise OSError(f"its name has {len(addresses)} addresses")
    if not all(policy.hosts.reaches(address, port) for address in addresses):
        raise Refused("forbidden", f"{_shown(url)} has an address that is not public")
    tls = _tls() if url.scheme == "https" else None
    failure = OSError()
    for address in addresses[:_TRIED]:
        try:
            async with asyncio.timeout(policy.seconds / _TRIED):
                return await asyncio.open_connection(
                    str(address), port, ssl=tls, server_hostname=host if tls else None
                )
        except OSError as error:
            failure = error
    raise failure


async def _exchange(
    url: httpx.URL, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int
) -> bytes | str:
    http = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
    headers = [(b"Host", url.netloc), *_HEADERS]
    head = http.send(h11.Request(method=b"GET", target=url.raw_path, headers=headers))
    writer.write((head or b"") + (http.send(h11.EndOfMessage()) or b""))
    body, left = bytearray(), MAX_OVERHEAD_BYTES
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_READ_BYTES)
            left -= len(data)
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            target = _redirect_of(url, event)
            if target is not None:
                return target
            left += 2 * max_bytes
            # The parser has checked that it is a number.
            left = -1 if any(int(n) > max_bytes for n in _values(event, b"content-length")) else left
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the connection is used otherwise")
        if left < 0 or len(body) > max_bytes:
            raise Refused(
                "too_large", f"{_shown(url)} sends more than the {max_bytes:,} bytes that a picture may have"
            )


def _redirect_of(url: httpx.URL, response: h11.Response) -> str | None:
    """Where a response redirects to; None: a body comes that is read. Raises Refused for any other one."""
    location = _values(response, b"location")
    if response.status_code in _REDIRECTS and location:
        return location[0].decode("ascii", "backslashreplace")
    if response.status_code != 200:
        raise Refused("unreachable", f"{_shown(url)} answers with status {response.status_code}")
    if any(value.lower() not in (b"", b"identity") for value in _values(response, b"content-encoding")):
        raise Refused("invalid", f"{_shown(url)} sends a compressed body, which is not read")
    return None


def _values(response: h11.Response, wanted: bytes) -> list[bytes]:
    return [value for name, value in response.headers if name == wanted]


@cache
def _tls() -> ssl.SSLContext:
    """Certificates of SSL_CERT_FILE, SSL_CERT_DIR or certifi."""
    return httpx.create_ssl_context()


def _shown(url: httpx.URL, port: int | None = None) -> str:
    """Scheme and host: paths and queries often have a token."""
    host = url.raw_host.decode("ascii", "replace")[:100]
    number = port or url.port
    return f"{url.scheme}://{host}" + (f":{number}" if number and number != _PORTS.get(url.scheme) else "")


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "its name has no address"
    return "its certificate or TLS is not accepted" if isinstance(error, ssl.SSLError) else "no connection"
