"""Options of certificates."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option
from penstock.config.groups.cors import CorsOptions


class TlsOptions(CorsOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of certificates."""

    ssl_certfile: Annotated[
        str | None,
        option("File with the certificate and its chain (PEM); turns TLS on.", "TLS", metavar="FILE"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        option(
            "File with the certificate's private key; default: the one of --ssl-certfile.",
            "TLS",
            metavar="FILE",
        ),
    ] = None
    enable_ssl_refresh: Annotated[
        bool, option("Use a new certificate when its files are replaced, without a restart.", "TLS")
    ] = False
    ssl_ca_certs: Annotated[
        str | None,
        option("File with the authorities whose client certificates are taken.", "TLS", metavar="FILE"),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        option(
            "Certificates of clients: 0 are not asked for, 1 are checked if presented, 2 are required.",
            "TLS",
            ge=0,
            le=2,
        ),
    ] = 0
