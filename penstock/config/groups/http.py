"""Options of the HTTP server: where it listens, whom it serves, and how much it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option

Host = Annotated[str, option("Address to listen on.", "HTTP server")]

Port = Annotated[
    int, option("Port to listen on; 0 takes a free one and prints it.", "HTTP server", ge=0, le=65535)
]

Uds = Annotated[
    str | None,
    option("Path of a unix socket to listen on, instead of a host and port.", "HTTP server"),
]

UdsMode = Annotated[
    str,
    option(
        "Permissions of the unix socket, octal: who may connect. The default is owner and group.",
        "HTTP server",
        pattern=r"^0?[0-7]{3}$",
    ),
]

RootPath = Annotated[
    str,
    option(
        "Path under which a proxy offers the server. Routes answer with it and without it.",
        "HTTP server",
        pattern=r"^((/[^/?#%\s]+)+|)$",
    ),
]

ApiKey = Annotated[
    list[str] | None,
    option("Keys that clients must present as a bearer token.", "HTTP server", secret=True),
]

ApiKeyFile = Annotated[
    str | None,
    option("File with further keys, one per line; lines that start with # are comments.", "HTTP server"),
]

ApiServerCount = Annotated[int, option("Number of API server processes.", "HTTP server", ge=1, le=1024)]

MaxRequestBytes = Annotated[int, option("Largest request body accepted, in bytes.", "HTTP server", ge=1024)]

MaxHeaderBytes = Annotated[
    int,
    option("Largest request line and headers accepted, in bytes together.", "HTTP server", ge=1024),
]

HeaderTimeout = Annotated[
    float,
    option(
        "Seconds a client has to send its request, headers and body, before it is cut.",
        "HTTP server",
        gt=0,
    ),
]

KeepAliveTimeout = Annotated[
    float, option("Seconds an idle connection is kept between requests.", "HTTP server", gt=0)
]

MaxConnections = Annotated[
    int, option("Connections one API server holds at most; further ones get 503.", "HTTP server", ge=1)
]

AccessLog = Annotated[
    Literal["none", "errors", "all"],
    option(
        "Requests to log at their end: none, all, or errors: those refused or not completed.",
        "HTTP server",
    ),
]

EnableRequestIdHeaders = Annotated[
    bool, option("Reply with X-Request-Id: the request's, or one made up for it.", "HTTP server")
]

StrictRequests = Annotated[
    bool, option("Refuse requests with unknown fields instead of ignoring them.", "HTTP server")
]

EnableForceIncludeUsage = Annotated[
    bool,
    option("End every stream with its usage, also where stream_options does not ask.", "HTTP server"),
]

MaxLogprobs = Annotated[
    int, option("Most alternatives a request may ask for per token.", "HTTP server", ge=0, le=20)
]
