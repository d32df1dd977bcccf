"""TLS of the listening socket."""

from __future__ import annotations

import ssl
from typing import NoReturn

from ..config.errors import ConfigError
from ..config.options import ServeConfig


def server_context(config: ServeConfig) -> ssl.SSLContext | None:
    """The context that the options ask for, None without TLS: TLS 1.2 and later, HTTP/1.1 inside.

    Raises ConfigError for options that do not fit together and for files that cannot be used.
    """
    if config.ssl_certfile is None:
        for flag, given in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
            ("--ssl-cert-reqs", config.ssl_cert_reqs),
        ):
            if given:
                raise ConfigError(f"{flag} {given}: TLS needs a certificate, too: --ssl-certfile")
        return None
    if bool(config.ssl_cert_reqs) != bool(config.ssl_ca_certs):
        raise ConfigError(
            "--ssl-ca-certs and --ssl-cert-reqs 1 or 2 need each other: the authorities, and whether "
            "certificates of clients are asked for"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    where = f"--ssl-certfile {config.ssl_certfile}"
    if config.ssl_keyfile is not None:
        where += f", --ssl-keyfile {config.ssl_keyfile}"
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if config.ssl_ca_certs is not None:
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {error}") from error
    return context


def _no_password() -> NoReturn:
    """Instead of asking at the terminal, where nobody answers a server."""
    raise ValueError("the private key has a password; store it without one, readable by the server alone")
