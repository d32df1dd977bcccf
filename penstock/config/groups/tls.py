"""Options of certificates."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option

SslCertfile = Annotated[
    str | None,
    option("File with the certificate and its chain (PEM); turns TLS on.", "TLS", metavar="FILE"),
]

SslKeyfile = Annotated[
    str | None,
    option(
        "File with the certificate's private key; default: the one of --ssl-certfile.",
        "TLS",
        metavar="FILE",
    ),
]

EnableSslRefresh = Annotated[
    bool, option("Use a new certificate when its files are replaced, without a restart.", "TLS")
]

SslCaCerts = Annotated[
    str | None,
    option("File with the authorities whose client certificates are taken.", "TLS", metavar="FILE"),
]

SslCertReqs = Annotated[
    int,
    option(
        "Certificates of clients: 0 are not asked for, 1 are checked if presented, 2 are required.",
        "TLS",
        ge=0,
        le=2,
    ),
]
