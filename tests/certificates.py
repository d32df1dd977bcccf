"""Certificates made for a run of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import trustme


class Certificates(NamedTuple):
    """Paths of PEM files."""

    authority: str
    chain: str
    key: str
    both: str
    """Key and chain in one file."""


def make(directory: Path, name: str = "127.0.0.1") -> Certificates:
    """An authority, and a certificate for ``name`` that it issued."""
    authority = trustme.CA()
    issued = authority.issue_cert(name)
    paths = Certificates(*(str(directory / f"{part}.pem") for part in Certificates._fields))
    authority.cert_pem.write_to_path(paths.authority)
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(paths.chain, append=number > 0)
    issued.private_key_pem.write_to_path(paths.key)
    issued.private_key_and_cert_chain_pem.write_to_path(paths.both)
    return paths
