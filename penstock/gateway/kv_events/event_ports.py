"""``--kv-events``: the ports at which endpoints publish the events of their KV caches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from penstock.config.errors import ConfigError
from penstock.gateway.kv_events.block_index import Source
from penstock.gateway.kv_events.subscriber import EventAddresses
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.upstream.exchange import port_of

_PORTS = re.compile(r"(?:(https?://[^=]+)=)?(\d{1,5})(?::(\d{1,5}))?")


class EventPorts:
    """Where endpoints publish, by ``--kv-events``."""

    def __init__(self, texts: Iterable[str], ranks: int) -> None:
        """``texts``: ``[URL=]PORT[:REPLAY_PORT]`` each; ``ranks`` of each endpoint, with consecutive ports.
        Raises ConfigError."""
        self._ranks = range(ranks)
        self._ports: dict[str | None, tuple[int, int | None]] = {}
        """Ports by URL; None: of endpoints without ports of their own."""
        for text in texts:
            match = _PORTS.fullmatch(text)
            if match is None:
                raise ConfigError(f"--kv-events {text}: it takes [URL=]PORT or [URL=]PORT:REPLAY_PORT")
            url, *numbers = match.groups()
            ports = [int(number) for number in numbers if number is not None]
            if any(not 0 < port <= 65536 - ranks for port in ports):
                raise ConfigError(f"--kv-events {text}: a port is between 1 and {65536 - ranks}")
            if len(ports) > 1 and abs(ports[0] - ports[1]) < ranks:
                raise ConfigError(
                    f"--kv-events {text}: with {ranks} ranks the two ports are at least {ranks} apart"
                )
            url = None if url is None else url.rstrip("/")
            if url in self._ports:
                raise ConfigError(f"--kv-events {text}: the port of {url or 'all others'} is given twice")
            self._ports[url] = ports[0], ports[1] if len(ports) > 1 else None

    def addresses(self, endpoint: Endpoint) -> Iterator[EventAddresses]:
        """The sources of an endpoint."""
        ports = self._ports.get(endpoint.url) or self._ports.get(None)
        if ports is None:
            return
        events, replay = ports
        host = endpoint.destination.rpartition(":")[0] or _host(endpoint.url)
        for rank in self._ranks:
            yield EventAddresses(
                Source(endpoint, rank),
                f"tcp://{host}:{events + rank}",
                None if replay is None else f"tcp://{host}:{replay + rank}",
            )


def _host(url: str) -> str:
    """The host of a URL, with the brackets of an IPv6 address."""
    return urlsplit(url).netloc.removesuffix(f":{port_of(url)}")
