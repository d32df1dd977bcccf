"""The certificates of the gRPC server for Envoy, read again when their files have changed."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.watched_file import check_regular, reason
from penstock.http.tls import ReplacedFiles, load_certificate


class Certificates(NamedTuple):
    """Contents of the files, PEM."""

    key: bytes
    chain: bytes
    client_authorities: bytes | None
    """Who issues the certificates that Envoys must have; None: they need none."""


def _read(cert_file: str, key_file: str, client_ca_file: str | None) -> Certificates:
    """Raise ConfigError, also for files that do not belong together."""
    key = _contents("--ext-proc-key-file", key_file)
    chain = _contents("--ext-proc-cert-file", cert_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        load_certificate(context, cert_file, key_file)
    except (OSError, ValueError) as error:
        where = f"--ext-proc-cert-file {cert_file}, --ext-proc-key-file {key_file}"
        raise ConfigError(f"{where}: {error}") from error
    if client_ca_file is None:
        return Certificates(key, chain, None)
    authorities = _contents("--ext-proc-client-ca-file", client_ca_file)
    try:
        context.load_verify_locations(client_ca_file)
    except OSError as error:
        raise ConfigError(f"--ext-proc-client-ca-file {client_ca_file}: {error}") from error
    return Certificates(key, chain, authorities)


def certificate_files(config: GatewayConfig) -> ReplacedFiles[Certificates] | None:
    """The files that the options name; None: the server is without TLS. Raises ConfigError."""
    cert, key = config.ext_proc_cert_file, config.ext_proc_key_file
    if cert is None or key is None:
        return None
    files = cert, key, config.ext_proc_client_ca_file
    return ReplacedFiles(f"--ext-proc-cert-file {cert}", files, partial(_read, *files))


def _contents(option: str, path: str) -> bytes:
    try:
        check_regular(path)
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {reason(error)}") from None
