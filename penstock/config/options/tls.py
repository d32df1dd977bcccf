"""TLS options."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option
from penstock.config.options.cors import CorsOptions


class TlsOptions(CorsOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS options."""

    ssl_certfile: Annotated[
        str | None,
        option("File with the server's certificate chain (PEM); enables TLS.", "TLS", metavar="FILE"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        option(
            "File with the private key (PEM). Default: --ssl-certfile holds it.",
            "TLS",
            metavar="FILE",
        ),
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
