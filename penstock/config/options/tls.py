"""TLS options of what ``serve`` and ``gateway`` listen on."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group


@option_group
class TlsOptions:
    """The certificate of the server, and what it asks of clients."""

    ssl_certfile: Annotated[
        str | None,
        option("File with the server's certificate chain (PEM); enables TLS.", "TLS", metavar="FILE"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        option("File with the private key (PEM). Default: --ssl-certfile holds it.", "TLS", metavar="FILE"),
    ] = None
    enable_ssl_refresh: Annotated[
        bool, option("Reload the certificate when its files change, without a restart.", "TLS")
    ] = False
    ssl_ca_certs: Annotated[
        str | None,
        option(
            "File with the CA certificates that client certificates are verified with (PEM).",
            "TLS",
            metavar="FILE",
        ),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        option(
            "Client certificates. 0: not requested; 1: verified if presented; 2: required.",
            "TLS",
            ge=0,
            le=2,
        ),
    ] = 0
