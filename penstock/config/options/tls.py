"""TLS options."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option
from penstock.config.options.cors import CorsOptions

SslCertfile = Annotated[
    str | None,
    option("File with the server's certificate chain (PEM); enables TLS.", "TLS", metavar="FILE"),
]
SslKeyfile = Annotated[
    str | None,
    option("File with the private key (PEM). Default: --ssl-certfile holds it.", "TLS", metavar="FILE"),
]
EnableSslRefresh = Annotated[
    bool, option("Reload the certificate when its files change, without a restart.", "TLS")
]
SslCaCerts = Annotated[
    str | None,
    option(
        "File with the CA certificates that client certificates are verified with (PEM).",
        "TLS",
        metavar="FILE",
    ),
]
SslCertReqs = Annotated[
    int,
    option(
        "Client certificates. 0: not requested; 1: verified if presented; 2: required.",
        "TLS",
        ge=0,
        le=2,
    ),
]


class TlsOptions(CorsOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS options."""

    ssl_certfile: SslCertfile = None
    ssl_keyfile: SslKeyfile = None
    enable_ssl_refresh: EnableSslRefresh = False
    ssl_ca_certs: SslCaCerts = None
    ssl_cert_reqs: SslCertReqs = 0
