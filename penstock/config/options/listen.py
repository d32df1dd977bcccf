"""Options of what ``serve`` and ``gateway`` listen on, and of bounds on what clients send."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from penstock.config.describe import option, option_group

GROUP = "HTTP server"

Port: TypeAlias = Annotated[
    int, option("TCP port to listen on; 0: a free port, which is printed.", GROUP, ge=0, le=65535)
]
MaxRequestBytes: TypeAlias = Annotated[
    int, option("Maximum size of a request body, in bytes.", GROUP, ge=1024)
]


@option_group
class ListenOptions:
    """Address, and limits of requests and connections."""

    host: Annotated[str, option("IP address or host name to listen on.", GROUP)] = "127.0.0.1"
    port: Port = 8000
    max_request_bytes: MaxRequestBytes = 16 << 20
    turn_memory: Annotated[
        int,
        option(
            "Memory of each API server for the last turns of long conversations, whose next turns then cost "
            "what they add, in bytes; 0: none.",
            GROUP,
            ge=0,
        ),
    ] = 256 << 20
    max_header_bytes: Annotated[
        int, option("Maximum size of request line and headers together, in bytes.", GROUP, ge=1024)
    ] = 64 << 10
    header_timeout: Annotated[
        float,
        option(
            "Maximum time for a client to send the headers of a request, for a pause within its body, and "
            "for its TLS handshake, in seconds. After that time a body must come with 1 KiB/s on average.",
            GROUP,
            gt=0,
        ),
    ] = 30.0
    keep_alive_timeout: Annotated[
        float, option("Time after which an idle connection is closed, in seconds.", GROUP, gt=0)
    ] = 75.0
    max_connections: Annotated[
        int,
        option(
            "Maximum client connections of each API server or gateway worker, and HTTP/2 requests at a time; "
            "further ones get 503. For want of open files (ulimit -n), further ones wait.",
            GROUP,
            ge=1,
        ),
    ] = 65536
