"""TLS of the HTTP server: its SSL context, and the reload of replaced certificates."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from typing import Generic, NoReturn, Protocol, TypeVar

from penstock.config.errors import ConfigError
from penstock.config.watched_file import check_regular

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
T = TypeVar("T")


class TlsConfig(Protocol):
    """The TLS options, of a server or a gateway."""

    @property
    def ssl_certfile(self) -> str | None: ...
    @property
    def ssl_keyfile(self) -> str | None: ...
    @property
    def enable_ssl_refresh(self) -> bool: ...
    @property
    def ssl_ca_certs(self) -> str | None: ...
    @property
    def ssl_cert_reqs(self) -> int: ...


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """The SSL context for the options (TLS 1.2 and later, HTTP/2 and HTTP/1.1); None without TLS.

    Raises ConfigError for files that cannot be loaded.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the default of some builds of Python is OpenSSL's
    context.set_alpn_protocols(["h2", "http/1.1"])
    where = f"--ssl-certfile {config.ssl_certfile}"
    if config.ssl_keyfile is not None:
        where += f", --ssl-keyfile {config.ssl_keyfile}"
    try:
        load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if config.ssl_ca_certs is not None:
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        try:
            check_regular(config.ssl_ca_certs)
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {error}") from error
    return context


class ReplacedFiles(Generic[T]):
    """What is made of the files of certificates, made again when one of them is replaced."""

    def __init__(self, where: str, paths: Iterable[str | None], make: Callable[[], T]) -> None:
        """``where`` names them in the log; ``make`` raises ConfigError, and so does this."""
        self._where = where
        self._paths = [path for path in paths if path is not None]
        self._make = make
        self._seen = self._versions()
        self._made = make()

    def latest(self) -> T:
        """Look at the files. While they do not match, because one is replaced first, the old ones stay in
        use."""
        seen = self._versions()
        if seen != self._seen:
            self._seen = seen
            try:
                self._made = self._make()
            except ConfigError as error:
                log.error("%s; the old certificate stays in use", error)
            else:
                log.info("%s: new connections get the new certificate", self._where)
        return self._made

    def _versions(self) -> list[tuple[int, int] | None]:
        return [_file_version(path) for path in self._paths]


def watched_certificate(context: ssl.SSLContext | None, config: TlsConfig) -> ReplacedFiles[None] | None:
    """Load the certificate into ``context``, then again when its files are replaced, if they fit; None
    without TLS or ``--enable-ssl-refresh``."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if context is None or certificate is None or not config.enable_ssl_refresh:
        return None
    where = f"--ssl-certfile {certificate}"

    def load() -> None:
        try:
            # Another context is tried first: a failed load leaves a context without a key.
            for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                load_certificate(each, certificate, key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error

    return ReplacedFiles(where, (certificate, key), load)


async def watch_files(files: ReplacedFiles[None]) -> None:
    """Look at them every WATCH_INTERVAL_S, until it is cancelled."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        files.latest()


def _file_version(path: str) -> tuple[int, int] | None:
    """A value that changes when the file is replaced or written; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    """``key``: None if the certificate's file has it. Raises OSError and ValueError."""
    for path in (certificate, key):
        if path is not None:
            check_regular(path)  # OpenSSL would wait for a pipe
    context.load_cert_chain(certificate, key, _no_password)


def _no_password() -> NoReturn:
    """Replace the prompt at the terminal."""
    raise ValueError("the private key has a password; store it without one, readable by the server alone")
