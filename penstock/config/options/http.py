"""Options of the HTTP server: address, authentication and limits."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option
from penstock.config.options.models import ModelOptions

Host = Annotated[str, option("IP address or host name to listen on.", "HTTP server")]

Port = Annotated[
    int, option("TCP port to listen on; 0: a free port, which is printed.", "HTTP server", ge=0, le=65535)
]

ApiKeyFile = Annotated[
    str | None,
    option(
        "File with additional API keys, one per line; lines that start with # are comments.", "HTTP server"
    ),
]

AdminApiKey = Annotated[
    list[str] | None,
    option(
        "Keys of administrators: administrative routes need one of them instead of a client's key, or of a "
        "local connection. They open all other routes, too. Default: every key opens all routes.",
        "HTTP server",
        secret=True,
    ),
]
AdminApiKeyFile = Annotated[
    str | None,
    option("File with further keys of administrators, written as --api-key-file.", "HTTP server"),
]

MaxRequestBytes = Annotated[int, option("Maximum size of a request body, in bytes.", "HTTP server", ge=1024)]

MaxHeaderBytes = Annotated[
    int, option("Maximum size of request line and headers together, in bytes.", "HTTP server", ge=1024)
]

HeaderTimeout = Annotated[
    float,
    option(
        "Maximum time for a client to send the headers of a request, for a pause within its body, and for "
        "its TLS handshake, in seconds. After that time a body must come with 1 KiB/s on average.",
        "HTTP server",
        gt=0,
    ),
]

KeepAliveTimeout = Annotated[
    float, option("Time after which an idle connection is closed, in seconds.", "HTTP server", gt=0)
]


class HttpOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the HTTP server: address, authentication and limits."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    uds: Annotated[
        str | None,
        option("Path of a unix socket to listen on instead of a TCP port.", "HTTP server"),
    ] = None
    uds_mode: Annotated[
        str,
        option(
            "Permissions of the unix socket, octal. The default allows owner and group to connect.",
            "HTTP server",
            pattern=r"^0?[0-7]{3}\Z",
            allowed="three octal digits",
        ),
    ] = "660"
    root_path: Annotated[
        str,
        option(
            "URL path prefix under which a proxy exposes the server. Requests with and without it "
            "are served.",
            "HTTP server",
            pattern=r"^((/[^/?#%\s]+)+|)\Z",
            allowed="a path such as /llm, without / at its end",
        ),
    ] = ""
    api_key: Annotated[
        list[str] | None,
        option(
            "API keys; clients must send one of them as a bearer token. Default: no authentication.",
            "HTTP server",
            secret=True,
        ),
    ] = None
    api_key_file: ApiKeyFile = None
    admin_api_key: AdminApiKey = None
    admin_api_key_file: AdminApiKeyFile = None
    allow_loopback_admin: Annotated[
        bool,
        option(
            "Without API keys, allow administrative routes (/sleep, /admin/..., /debug/...) to programs on "
            "this machine: connections from a loopback address. A proxy on this machine that adds no header "
            "such as X-Forwarded-For allows them to its clients, too. Default: over a unix socket only.",
            "HTTP server",
        ),
    ] = False
    shared_prefix_cache: Annotated[
        bool,
        option(
            "Share cached prefixes between API keys. Default: between requests with the same key only, so "
            "that neither cached_tokens nor drafts tell what others have sent or were answered.",
            "HTTP server",
        ),
    ] = False
    api_server_count: Annotated[
        int, option("Number of API server processes.", "HTTP server", ge=1, le=1024)
    ] = 1
    max_request_bytes: MaxRequestBytes = 16 << 20
    max_header_bytes: MaxHeaderBytes = 64 << 10
    header_timeout: HeaderTimeout = 30.0
    keep_alive_timeout: KeepAliveTimeout = 75.0
    max_connections: Annotated[
        int,
        option(
            "Maximum connections per API server, and HTTP/2 requests at a time; further ones get 503. "
            "For want of open files (ulimit -n), further ones wait.",
            "HTTP server",
            ge=1,
        ),
    ] = 65536
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option(
            "Requests to log when they finish. errors: those refused or not completed; all: also the others, "
            "but for probes (/health, /ready, /ping), /metrics and /status.",
            "HTTP server",
        ),
    ] = "none"
    enable_request_id_headers: Annotated[
        bool, option("Add X-Request-Id to responses: the client's value, or a generated one.", "HTTP server")
    ] = False
    web_page: Annotated[
        bool,
        option("Serve a web page with chat, API reference and live status at / and /docs.", "HTTP server"),
    ] = True
    strict_requests: Annotated[
        bool, option("Reject requests with unknown fields instead of ignoring these fields.", "HTTP server")
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        option(
            "Send usage with every event and at the end of every stream, whatever its stream_options say. "
            "This costs CPU for every event.",
            "HTTP server",
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        option(
            "Serve /tokenizer_info: the tokenizer's configuration, with the chat template.", "HTTP server"
        ),
    ] = False
    max_logprobs: Annotated[
        int,
        option(
            "Maximum logprobs per token that a request may ask for; -1: the whole vocabulary.",
            "HTTP server",
            ge=-1,
        ),
    ] = 20
