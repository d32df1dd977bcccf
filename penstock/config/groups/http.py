"""Options of the HTTP server: where it listens, whom it serves, and how much it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option
from penstock.config.groups.models import ModelOptions

Host = Annotated[str, option("Address to listen on.", "HTTP server")]

Port = Annotated[
    int, option("Port to listen on; 0 takes a free one and prints it.", "HTTP server", ge=0, le=65535)
]

ApiKeyFile = Annotated[
    str | None,
    option("File with further keys, one per line; lines that start with # are comments.", "HTTP server"),
]

MaxRequestBytes = Annotated[int, option("Largest request body accepted, in bytes.", "HTTP server", ge=1024)]


class HttpOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the HTTP server: where it listens, whom it serves, and how much it takes."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    uds: Annotated[
        str | None,
        option("Path of a unix socket to listen on, instead of a host and port.", "HTTP server"),
    ] = None
    uds_mode: Annotated[
        str,
        option(
            "Permissions of the unix socket, octal: who may connect. The default is owner and group.",
            "HTTP server",
            pattern=r"^0?[0-7]{3}$",
        ),
    ] = "660"
    root_path: Annotated[
        str,
        option(
            "Path under which a proxy offers the server. Routes answer with it and without it.",
            "HTTP server",
            pattern=r"^((/[^/?#%\s]+)+|)$",
        ),
    ] = ""
    api_key: Annotated[
        list[str] | None,
        option("Keys that clients must present as a bearer token.", "HTTP server", secret=True),
    ] = None
    api_key_file: ApiKeyFile = None
    api_server_count: Annotated[
        int, option("Number of API server processes.", "HTTP server", ge=1, le=1024)
    ] = 1
    max_request_bytes: MaxRequestBytes = 64 << 20
    max_header_bytes: Annotated[
        int,
        option("Largest request line and headers accepted, in bytes together.", "HTTP server", ge=1024),
    ] = 64 << 10
    header_timeout: Annotated[
        float,
        option(
            "Seconds a client has to send its request, headers and body, before it is cut.",
            "HTTP server",
            gt=0,
        ),
    ] = 30.0
    keep_alive_timeout: Annotated[
        float, option("Seconds an idle connection is kept between requests.", "HTTP server", gt=0)
    ] = 75.0
    max_connections: Annotated[
        int, option("Connections one API server holds at most; further ones get 503.", "HTTP server", ge=1)
    ] = 65536
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option(
            "Requests to log at their end: none, all, or errors: those refused or not completed.",
            "HTTP server",
        ),
    ] = "none"
    enable_request_id_headers: Annotated[
        bool, option("Reply with X-Request-Id: the request's, or one made up for it.", "HTTP server")
    ] = False
    strict_requests: Annotated[
        bool, option("Refuse requests with unknown fields instead of ignoring them.", "HTTP server")
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        option("End every stream with its usage, also where stream_options does not ask.", "HTTP server"),
    ] = False
    max_logprobs: Annotated[
        int, option("Most alternatives a request may ask for per token.", "HTTP server", ge=0, le=20)
    ] = 20
