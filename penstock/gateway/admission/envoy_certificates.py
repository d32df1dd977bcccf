"""The certificates of the gRPC server for Envoy, read again when their files have changed."""

from __future__ import annotations

import ipaddress
import ssl
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.secret_files import warn_if_open_to_others
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
    """The files that the options name; None: the server is without TLS. Raises ConfigError for options that
    contradict each other, and for a server that others can reach and anybody may use."""
    cert, key, client_ca = config.ext_proc_cert_file, config.ext_proc_key_file, config.ext_proc_client_ca_file
    given = {"cert-file": cert, "key-file": key, "client-ca-file": client_ca, "host": config.ext_proc_host}
    if config.ext_proc_port is None:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"--ext-proc-{name} {value}: there is no --ext-proc-port")
        if config.ext_proc_insecure:
            raise ConfigError("--ext-proc-insecure: there is no --ext-proc-port")
        return None
    host = config.ext_proc_host or config.host
    if client_ca is None and not (config.ext_proc_insecure or _is_loopback(host)):
        raise ConfigError(
            f"--ext-proc-port {config.ext_proc_port} on {host}: whoever reaches it can report outcomes and "
            "gets the endpoints' addresses and key, so Envoy has to prove who it is: --ext-proc-cert-file, "
            "--ext-proc-key-file and --ext-proc-client-ca-file. Or listen on this machine alone "
            "(--ext-proc-host 127.0.0.1), or trust everybody (--ext-proc-insecure)"
        )
    if client_ca is not None and config.ext_proc_insecure:
        raise ConfigError("--ext-proc-insecure and --ext-proc-client-ca-file exclude each other")
    if cert is None and key is None and client_ca is None:
        return None
    for name in ("cert-file", "key-file"):
        if given[name] is None:
            raise ConfigError(f"--ext-proc-{name} is missing: a certificate and its key come together")
    assert cert is not None
    assert key is not None
    warn_if_open_to_others("--ext-proc-key-file", key)
    files = cert, key, client_ca
    return ReplacedFiles(f"--ext-proc-cert-file {cert}", files, partial(_read, *files))


def _contents(option: str, path: str) -> bytes:
    try:
        check_regular(path)
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {reason(error)}") from None


def _is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach ``host``; a name may be any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
