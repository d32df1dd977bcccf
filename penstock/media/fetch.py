"""Fetches a picture by its URL, from where the operator allows and nowhere else.

A host is checked by its name before it is resolved, and by every address that the name has; the connection is
made to an address that was checked, so that a name server that answers differently later changes nothing.
Redirects are followed here, each checked like the first URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from ipaddress import ip_address
from typing import Any, NamedTuple

import httpcore
import httpx

from penstock import __version__
from penstock.config.rules.allowed_hosts import Address, AllowedHosts, address_of
from penstock.media.local_files import read_local
from penstock.media.refused import Refused

MAX_REDIRECTS = 5
MAX_ADDRESSES = 64
"""Addresses of one name."""
_TRIED = 3
"""Addresses that are tried, one after the other."""
_READ_BYTES = 1 << 15
"""Bytes of one read, which is parsed in one turn of the loop."""
_OVERHEAD = 1 << 18
"""Bytes of one connection besides its body: TLS aside, heads and informational replies."""
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
        except Refused:
            raise
        except (httpcore.NetworkError, httpcore.TimeoutException, OSError) as error:
            # Also a name that does not resolve, and a certificate that is not the host's.
            raise Refused("unreachable", f"{_shown(url)} cannot be reached: {_reason(error)}") from None
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol):
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
    """The body, or where the host redirects to."""
    target = httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port or _PORTS[url.scheme], target=url.raw_path
    )
    headers = [
        (b"Host", url.netloc),
        (b"User-Agent", f"penstock/{__version__}".encode()),
        (b"Accept", b"image/*"),
        (b"Accept-Encoding", b"identity"),
        (b"Connection", b"close"),
    ]
    tls = _tls() if url.scheme == "https" else None
    network = _CheckedNetwork(policy, resolve, _shown(url))
    async with (
        httpcore.AsyncHTTPConnection(target.origin, tls, network_backend=network) as connection,
        connection.stream("GET", target, headers=headers) as response,
    ):
        network.left += 2 * policy.max_bytes
        fields = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in fields:
            return fields[b"location"].decode("ascii", "backslashreplace")
        if response.status != 200:
            raise Refused("unreachable", f"{_shown(url)} answers with status {response.status}")
        if fields.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise Refused("invalid", f"{_shown(url)} sends a compressed body, which is not read")
        return await _read(response, fields.get(b"content-length"), policy.max_bytes)


async def _read(response: httpcore.Response, announced: bytes | None, max_bytes: int) -> bytes:
    data = bytearray()
    # The parser has checked that it is a number.
    if announced is None or int(announced) <= max_bytes:
        async for piece in response.aiter_stream():
            data += piece
            if len(data) > max_bytes:
                break
        else:
            return bytes(data)
    raise Refused("too_large", f"the picture has more than {max_bytes:,} bytes")


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Resolves, checks every address and connects to one of them."""

    def __init__(self, policy: FetchPolicy, resolve: Resolve, shown: str) -> None:
        self._policy = policy
        self._resolve = resolve
        self._shown = shown
        self._network = httpcore.AnyIOBackend()
        self.left = _OVERHEAD
        """Bytes that may come yet, of whatever kind."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore's interface)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        literal = address_of(host)
        addresses: list[Address]
        if literal is not None:
            addresses = [literal]
        else:
            addresses = [ip_address(text) for text in dict.fromkeys(await self._resolve(host, port))]
        if not 0 < len(addresses) <= MAX_ADDRESSES:
            raise httpcore.ConnectError(f"its name has {len(addresses)} addresses")
        if not all(self._policy.hosts.reaches(address, port) for address in addresses):
            raise Refused("forbidden", f"{self._shown} has an address that is not public")
        failure: Exception | None = None
        for address in addresses[:_TRIED]:
            try:
                stream = await self._network.connect_tcp(
                    str(address), port, self._policy.seconds / _TRIED, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _BoundedStream(stream, self)
        assert failure is not None
        raise failure


class _BoundedStream(httpcore.AsyncNetworkStream):
    """Ends a connection that sends more than it may."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, network: _CheckedNetwork) -> None:
        self._stream = stream
        self._network = network

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        data = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._network.left -= len(data)
        if self._network.left < 0:
            raise Refused("too_large", "the host sends more than a picture has")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _BoundedStream(stream, self._network)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


@cache
def _tls() -> ssl.SSLContext:
    """Certificates of SSL_CERT_FILE, SSL_CERT_DIR or certifi."""
    return httpx.create_ssl_context()


def _shown(url: httpx.URL, port: int | None = None) -> str:
    """Scheme and host: paths and queries often have a token."""
    host = url.raw_host.decode("ascii", "replace")[:100]
    number = port or url.port
    return f"{url.scheme}://{host}" + (f":{number}" if number and number != _PORTS.get(url.scheme) else "")


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    if isinstance(error, httpcore.TimeoutException):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "its name has no address"
    if isinstance(cause, ssl.SSLError) or isinstance(error.__context__, ssl.SSLError):
        return "its certificate or TLS is not accepted"
    return "no connection"
