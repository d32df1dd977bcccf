"""Options of the gateway: which routes it relays, and what else it listens on."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import ALLOWED_KEY, Key, option, option_group


@option_group
class RouteOptions:
    """Options of the gateway: the routes that it relays."""

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
            "API key to send to the endpoints whose pool has none of its own. Default: the client's own.",
            "HTTP server",
            secret=True,
            allowed=ALLOWED_KEY,
        ),
    ] = None


@option_group
class EnvoyOptions:
    """Options of the gateway: its server for Envoy's external processing."""

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
