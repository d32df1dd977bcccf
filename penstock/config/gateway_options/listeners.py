"""Options of the gateway: what it listens on, and whom it serves."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import ALLOWED_KEY, Key, option
from penstock.config.gateway_options.endpoints import EndpointOptions
from penstock.config.options import http, tls


class ListenerOptions(EndpointOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the gateway: what it listens on, and whom it serves."""

    host: http.Host = "127.0.0.1"
    port: http.Port = 8080
    ssl_certfile: tls.SslCertfile = None
    ssl_keyfile: tls.SslKeyfile = None
    enable_ssl_refresh: tls.EnableSslRefresh = False
    ssl_ca_certs: tls.SslCaCerts = None
    ssl_cert_reqs: tls.SslCertReqs = 0
    ext_proc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        option(
            "Port of the gRPC server for Envoy's external processing; 0: a free port, which is "
            "printed. Default: off.",
            "Envoy",
        ),
    ] = None
    ext_proc_host: Annotated[
        str | None,
        option("IP address or host name that this server listens on. Default: --host.", "Envoy"),
    ] = None
    ext_proc_cert_file: Annotated[
        str | None,
        option(
            "Certificate chain of that server (PEM), reloaded when it changes. Default: no TLS.",
            "Envoy",
            metavar="FILE",
        ),
    ] = None
    ext_proc_key_file: Annotated[
        str | None, option("Private key of that certificate (PEM).", "Envoy", metavar="FILE")
    ] = None
    ext_proc_client_ca_file: Annotated[
        str | None,
        option(
            "CA certificates of the Envoys that may use that server (PEM): each must present a certificate. "
            "Needed on an address that is not loopback, unless --ext-proc-insecure.",
            "Envoy",
            metavar="FILE",
        ),
    ] = None
    ext_proc_insecure: Annotated[
        bool,
        option(
            "Let that server listen on an address that is not loopback for whoever reaches it, without a "
            "certificate. They can report outcomes, and get the endpoints' addresses and --endpoint-api-key.",
            "Envoy",
        ),
    ] = False
    api_key: Annotated[
        list[str] | None,
        option(
            "API keys; clients must send one of them as a bearer token. Default: no authentication.",
            "HTTP server",
            secret=True,
        ),
    ] = None
    api_key_file: http.ApiKeyFile = None
    admin_api_key: http.AdminApiKey = None
    admin_api_key_file: http.AdminApiKeyFile = None
    allow_loopback_admin: Annotated[
        bool,
        option(
            "Without API keys, answer /debug/gc to programs on this machine: connections from a loopback "
            "address. Default: to nobody.",
            "HTTP server",
        ),
    ] = False
    allow_route: Annotated[
        list[Annotated[str, Meta(pattern=r"^([A-Z]+ )?/[^?#%\\\s]*\Z")]] | None,
        option(
            "Further routes to relay, besides inference: /path, or /path/* for all below it; with a method "
            "before it ('POST /path') only that one.",
            "HTTP server",
            allowed="/path, /path/*, or a method and either, without ?, # and %",
            metavar="ROUTE",
        ),
    ] = None
    root_path: Annotated[
        str,
        option(
            "URL path prefix that model servers strip (--root-path of Penstock, vLLM and SGLang, "
            "--api-prefix of llama.cpp). Requests with and without it are served, and relayed as they are. "
            "The gateway reads /metrics and /v1/models below it.",
            "HTTP server",
            pattern=r"^((/[^/?#%\s]+)+|)\Z",
            allowed="a path such as /llm, without / at its end",
        ),
    ] = ""
    endpoint_api_key: Annotated[
        Key | None,
        option(
            "API key to send to the endpoints. Default: the client's own.",
            "HTTP server",
            secret=True,
            allowed=ALLOWED_KEY,
        ),
    ] = None
    max_request_bytes: http.MaxRequestBytes = 64 << 20
    max_header_bytes: http.MaxHeaderBytes = 64 << 10
    header_timeout: http.HeaderTimeout = 30.0
    keep_alive_timeout: http.KeepAliveTimeout = 75.0
    max_connections: Annotated[
        int,
        option(
            "Maximum client connections of each worker, and HTTP/2 requests at a time; further ones get 503. "
            "For want of open files (ulimit -n), further ones wait.",
            "HTTP server",
            ge=1,
        ),
    ] = 65536
