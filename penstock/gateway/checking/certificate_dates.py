"""Until when the certificates hold that a gateway uses."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.config.gateway import GatewayConfig
from penstock.gateway.models.pools import Pool

SOON_S = 14 * 86_400.0
"""A certificate that ends earlier is warned of."""
FILES = (
    *("ssl_certfile", "ssl_ca_certs", "upstream_ca_file", "upstream_cert_file"),
    *("ext_proc_cert_file", "ext_proc_client_ca_file"),
)
"""Options with files of certificates."""
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
"""UTCTime and GeneralizedTime, as RFC 5280 §4.1.2.5 has them."""
_VERSION = 0xA0


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
            ends = [
                _not_after(ssl.PEM_cert_to_DER_cert(text)) for text in _PEM.findall(Path(path).read_text())
            ]
        except (OSError, ValueError):
            continue
        if ends:
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


def _not_after(der: bytes) -> datetime:
    """The end of a certificate's validity (RFC 5280 §4.1). Raises ValueError."""
    try:
        _, certificate = next(_elements(der))
        _, signed = next(_elements(certificate))
        fields = [element for element in _elements(signed) if element[0] != _VERSION]
        _, (tag, text) = _elements(fields[3][1])  # after serial number, algorithm and issuer
        return datetime.strptime(text.decode(), _TIMES[tag]).replace(tzinfo=UTC)
    except (LookupError, StopIteration) as error:
        raise ValueError("this is no certificate") from error


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and contents of what is in an element of DER (X.690 §8.1)."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count]), at + count
        yield tag, der[at : at + size]
        at += size
