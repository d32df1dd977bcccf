"""Finds endpoints: reads the endpoints file when it changes, and resolves host names."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.gateway import Url
from penstock.gateway.upstream.exchange import port_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedEndpoint:
    """One endpoint found."""

    url: str
    """URL as configured."""
    address: str | None = None
    """One of several addresses of the host name; None: connections are made to the name itself."""
    destination: str = ""
    """IP address and port, the form that Envoy takes; empty: the name does not resolve."""

    @property
    def label(self) -> str:
        """URL of this one endpoint, used in metrics and logs."""
        if self.address is None:
            return self.url
        return f"{urlsplit(self.url).scheme}://{host_and_port(self.address, port_of(self.url))}"


def host_and_port(address: str, port: int) -> str:
    """``address:port``, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


async def resolve(urls: Iterable[str], known: Sequence[ResolvedEndpoint] = ()) -> list[ResolvedEndpoint]:
    """One endpoint for each address of each host name. A name that does not resolve keeps its endpoints among
    ``known``, because name servers fail more often than all the hosts of a name. Without any it becomes one
    endpoint by its name, so that it shows up as unreachable."""
    found: list[ResolvedEndpoint] = []
    for url in urls:
        host = urlsplit(url).hostname
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port_of(url), type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning("%s: %s", url, error)
            infos = []
            if before := [target for target in known if target.url == url]:
                found += before
                continue
        addresses = sorted({str(info[4][0]) for info in infos})
        if len(addresses) > 1 and host != "localhost":  # one server with an address per protocol
            found += [
                ResolvedEndpoint(url, address, host_and_port(address, port_of(url))) for address in addresses
            ]
        else:
            destination = host_and_port(addresses[0], port_of(url)) if addresses else ""
            found.append(ResolvedEndpoint(url, destination=destination))
    return found


class EndpointsFile:
    """A file of URLs, see :func:`read_endpoints`, that is read again when it has changed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int] | None = None
        self._urls: list[str] = []
        self._problem = ""
        """The problem logged last, so that it is not logged every second."""

    def urls(self) -> list[str]:
        """URLs in the file. Raises ConfigError when it is invalid at the first read; later the last valid
        contents stay in effect."""
        try:
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._urls = read_endpoints(self._path.read_text())
                self._stamp = stamp
            self._problem = ""
        except (OSError, ValueError) as error:
            problem = f"--endpoints-file {self._path}: {error}"
            if self._stamp is None:
                raise ConfigError(problem) from None
            if problem != self._problem:
                log.error("%s; the endpoints stay as they are", problem)
            self._problem = problem
        return self._urls


def read_endpoints(text: str) -> list[str]:
    """URLs of an endpoints file: a YAML list, a YAML mapping with such a list as ``endpoints``, or plain text
    with one URL on each line. Raises ValueError."""
    import yaml  # takes tens of milliseconds, needed only with such a file

    bare = _COMMENT.sub("", text)  # YAML allows no comments between the lines of a scalar
    try:
        said = yaml.safe_load(bare)
        if isinstance(said, dict):
            said = msgspec.convert(said, _EndpointsDocument).endpoints
        urls = msgspec.convert(said.split() if isinstance(said, str) else said or [], list[str])
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from None
    for url in urls:
        try:
            port_of(msgspec.convert(url, Url))
        except ValueError:  # ValidationError is one
            raise ValueError(f"{url!r} is not http://HOST:PORT") from None
    return urls


_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)


class _EndpointsDocument(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: list[str]
