"""Finds endpoints: resolves host names."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from urllib.parse import urlsplit

from penstock.gateway.routing.endpoint import Role
from penstock.gateway.upstream.exchange import port_of
from penstock.gateway.upstream.upstream import Upstream

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Seconds until names are looked up again when an endpoint is away; doubled each time."""


@dataclass(frozen=True, slots=True)
class ResolvedEndpoint:
    """One endpoint found."""

    url: str
    """URL as configured."""
    address: str | None = None
    """Address of the host name that connections are made to; None: they are made to the host of the URL."""
    destination: str = ""
    """IP address and port, the form that Envoy takes; empty: the name does not resolve."""
    pool: str = ""
    """Name of its pool; empty: it is in none."""
    role: Role = "both"
    upstream: Upstream | None = None
    """How it is reached; None: as the options say."""
    apis: frozenset[str] | None = None
    """Names of the APIs that it speaks; None: what clients send is relayed as it is."""

    @property
    def identity(self) -> Hashable:
        """Equal for the same server that is reached in the same way, however many others its name stands for.
        The name belongs to it: a proxy may have several servers behind one address, or below one name."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        return parts.scheme, parts.hostname, self.address, port_of(self.url), path, self.upstream

    @property
    def is_hosted(self) -> bool:
        return self.upstream is not None and self.upstream.hosted

    @property
    def label(self) -> str:
        """URL of this one endpoint, used in metrics and logs. It has the address, as the name may stand for
        more servers at any time."""
        if self.address is None:
            return self.url.rstrip("/")
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{host_and_port(self.address, port_of(self.url))}{parts.path.rstrip('/')}"


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
        except (OSError, UnicodeError) as error:  # a name with an empty or too long label cannot be encoded
            log.warning("%s: %s", url, error)
            infos = []
            if before := [target for target in known if target.url == url]:
                found += before
                continue
        addresses = sorted({str(info[4][0]) for info in infos})
        destinations = [host_and_port(address, port_of(url)) for address in addresses]
        if (
            not addresses or host == "localhost" or addresses == [host]
        ):  # localhost: one server, two protocols
            found.append(ResolvedEndpoint(url, destination=destinations[0] if destinations else ""))
        else:
            found += map(ResolvedEndpoint, repeat(url), addresses, destinations)
    return found


class ResolveSchedule:
    """When names are looked up again: after an interval, and earlier while an endpoint is away, as its name
    may have another address. Times are seconds of any monotonic clock."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._resolved_at = now
        self._pause_s = FIRST_PAUSE_S

    def is_due(self, now: float, *, away: bool) -> bool:
        """``away``: an endpoint cannot be connected to."""
        if not away:
            self._pause_s = FIRST_PAUSE_S
        pause_s = min(self._pause_s, self._interval_s) if away else self._interval_s
        return now - self._resolved_at >= pause_s

    def resolved(self, now: float) -> None:
        self._resolved_at = now
        self._pause_s = min(2 * self._pause_s, self._interval_s)
