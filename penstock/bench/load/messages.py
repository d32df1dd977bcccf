"""What the load client's process is told, and what it answers: one JSON object per line."""

from __future__ import annotations

import msgspec

from penstock.bench.load.latency import Latency


class LoadPlan(msgspec.Struct, frozen=True):
    """Server, requests and connections. Requests use the ``bodies`` (JSON texts) in turn.

    ``http2``: HTTP/2 by prior knowledge, or by ALPN with TLS; a connection then carries up to
    ``streams_per_connection`` requests at a time, over HTTP/1.1 one. ``authority``: file with the certificate
    that the server's TLS is verified with; None for clear text.
    """

    host: str
    port: int
    path: str
    bodies: list[str]
    connections: int
    in_flight: int
    requests: int
    api_key: str | None = None
    http2: bool = False
    streams_per_connection: int = 1
    authority: str | None = None

    @property
    def alpn(self) -> str:
        """The protocol's name in a TLS handshake."""
        return "h2" if self.http2 else "http/1.1"


class RoundOrder(msgspec.Struct, frozen=True):
    """Run one round within ``seconds``. ``keep``: its latencies count in the totals of later results."""

    keep: bool
    seconds: float


class LoadReady(msgspec.Struct, frozen=True, tag="ready"):
    """All connections are open."""


class LoadFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The load client stops."""

    reason: str


class RoundResult(msgspec.Struct, frozen=True, tag="round"):
    """Results of one round. ``errors`` counts failed requests; times are in seconds.

    ``bytes`` are those of the HTTP connections, without TLS; ``reads`` the reads that brought them.
    ``ttft_ms`` and ``itl_ms`` are for this round, ``all_ttft_ms`` and ``all_itl_ms`` for all kept rounds.
    """

    requests: int
    errors: int
    error_samples: list[str]
    events: int
    bytes: int
    reads: int
    wall_s: float
    cpu_s: float
    ttft_ms: Latency
    itl_ms: Latency
    all_ttft_ms: Latency
    all_itl_ms: Latency


LoadMessage = LoadReady | LoadFailure | RoundResult
