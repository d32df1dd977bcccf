"""The certificate of a measured server, made for one run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.bench.errors import BenchError


class Certificate(NamedTuple):
    """Paths of PEM files: the authority that clients trust, and the server's key and chain in one file."""

    authority: str
    server: str


def make_certificate(directory: Path) -> Certificate:
    """A certificate for this machine by an authority of its own. Raises BenchError without trustme."""
    try:
        import trustme
    except ImportError:
        raise BenchError("--tls: certificates are made by the package trustme: pip install trustme") from None
    made = Certificate(str(directory / "authority.pem"), str(directory / "server.pem"))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(made.authority)
    issued = authority.issue_cert("127.0.0.1", "::1", "localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(made.server)
    return made
