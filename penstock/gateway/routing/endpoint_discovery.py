"""From what the operator names to the endpoints that it stands for: files that change, names that resolve."""

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
from penstock.gateway.upstream.http_client import port_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedEndpoint:
    """One endpoint to be."""

    url: str
    """As the operator named it."""
    address: str | None = None
    """The address of the several that its name has; None: the name itself is connected to."""
    destination: str = ""
    """IP address and port, as Envoy takes it; empty: the name does not resolve."""

    @property
    def label(self) -> str:
        """What it is called in metrics and logs: its own URL."""
        if self.address is None:
            return self.url
        return f"{urlsplit(self.url).scheme}://{host_and_port(self.address, port_of(self.url))}"


def host_and_port(address: str, port: int) -> str:
    """With brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


async def resolve(urls: Iterable[str], known: Sequence[ResolvedEndpoint] = ()) -> list[ResolvedEndpoint]:
    """One target for each address of each name. A name that does not resolve keeps those that it had among
    ``known``: name servers fail more often than all that they name. Without any it stands for itself: it is
    an endpoint that cannot be reached, and shows up as one."""
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
        if len(addresses) > 1 and host != "localhost":  # which has one per protocol, for the same server
            found += [
                ResolvedEndpoint(url, address, host_and_port(address, port_of(url))) for address in addresses
            ]
        else:
            destination = host_and_port(addresses[0], port_of(url)) if addresses else ""
            found.append(ResolvedEndpoint(url, destination=destination))
    return found


class EndpointsFile:
    """A file with URLs, see :func:`read_endpoints`; read again whenever it has changed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int] | None = None
        self._urls: list[str] = []
        self._problem = ""
        """Why it cannot be used, as it was logged last: it is looked at every second."""

    def urls(self) -> list[str]:
        """What the file says. Raises ConfigError for a file that cannot be used when it is read first; later
        the last good one counts."""
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
    """URLs of an endpoints file: YAML, a list of them, or a mapping with such a list as ``endpoints``; or
    nothing but URLs, one on each line. Raises ValueError."""
    import yaml  # tens of milliseconds, for those who have such a file

    bare = _COMMENT.sub("", text)  # YAML takes none between the lines of a text
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
