"""Until when the certificates hold that a gateway uses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cryptography.x509 import load_pem_x509_certificates

from penstock.config.gateway import GatewayConfig
from penstock.gateway.models.pools import Pool

SOON_S = 14 * 86_400.0
"""A certificate that ends earlier is warned of."""
FILES = (
    *("ssl_certfile", "ssl_ca_certs", "upstream_ca_file", "upstream_cert_file"),
    *("ext_proc_cert_file", "ext_proc_client_ca_file"),
)
"""Options with files of certificates."""


def certificates(
    config: GatewayConfig, pools: Iterable[Pool] = (), now: float | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The files of certificates, each with the end of the one that ends first, and warnings of those that
    have ended or will soon. Files that cannot be read are left out: they are errors. ``now``: seconds since
    the epoch."""
    now = time.time() if now is None else now
    found, warnings = [], []
    for where, path in _files(config, pools):
        try:
            ends = [each.not_valid_after_utc for each in load_pem_x509_certificates(Path(path).read_bytes())]
        except (OSError, ValueError):
            continue
        first = min(ends)
        found.append({"option": where, "file": path, "until": first.isoformat()})
        if first.timestamp() - now < SOON_S:
            did = "has ended" if first.timestamp() <= now else "ends"
            which = "the certificate" if len(ends) == 1 else f"the first of {len(ends)} certificates"
            warnings.append(f"{where} {path}: {which} {did} on {first:%Y-%m-%d %H:%M} UTC")
    return found, warnings


def _files(config: GatewayConfig, pools: Iterable[Pool]) -> Iterator[tuple[str, str]]:
    """Where each file of certificates is named, and its path."""
    for field in FILES:
        if (path := getattr(config, field)) is not None:
            yield f"--{field.replace('_', '-')}", path
    for pool in pools:
        for field in ("ca_file", "cert_file"):
            if pool.tls is not None and (path := getattr(pool.tls, field)) is not None:
                yield f"pool {pool.name}: tls.{field.replace('_', '-')}", path
