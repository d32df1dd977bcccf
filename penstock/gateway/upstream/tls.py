"""TLS to model servers: whom to trust, and the gateway's own certificate."""

from __future__ import annotations

import functools
import ssl

from penstock.config.errors import ConfigError
from penstock.config.watched_file import check_regular
from penstock.http.tls import ReplacedFiles, load_certificate


class UpstreamTls:
    """Contexts for connections to model servers. They are made again when one of the files has changed, which
    is looked for when a connection is opened."""

    def __init__(
        self,
        *,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        server_name: str | None = None,
        pool: str = "",
    ) -> None:
        """``ca_file``: authorities that are trusted instead of the system's; ``cert_file``, ``key_file``: of
        the gateway, None: the certificate has the key. ``server_name`` replaces the host of an endpoint's URL
        in the handshake. ``pool``: whose servers it is for; empty: it is that of the options. Raises
        ConfigError."""
        self._pool = pool
        self.server_name = server_name
        self._ca_file = ca_file
        self._cert_file = cert_file
        self._key_file = key_file
        files = ca_file, cert_file, key_file
        self._files = None
        """What makes contexts of the files, by whether HTTP/2 is offered; None: there are none."""
        if any(files):
            self._files = ReplacedFiles("certificates for model servers", files, self._make)

    def name_of(self, field: str) -> str:
        """What sets a field, as messages name it."""
        field = field.replace("_", "-")
        return f"pool {self._pool}: tls.{field}" if self._pool else f"--upstream-{field}"

    def context(self, *, with_http2: bool) -> ssl.SSLContext:
        """The context for a new connection; ``with_http2``: it offers HTTP/2."""
        if self._files is None:
            return _system_context(with_http2=with_http2)
        return self._files.latest()[with_http2]

    def _make(self) -> dict[bool, ssl.SSLContext]:
        """Raises ConfigError."""
        return {with_http2: self._make_context(with_http2=with_http2) for with_http2 in (False, True)}

    def _make_context(self, *, with_http2: bool) -> ssl.SSLContext:
        try:
            if self._ca_file is not None:
                check_regular(self._ca_file)
            context = _context(self._ca_file, with_http2=with_http2)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.name_of('ca_file')} {self._ca_file}: {error}") from error
        if self._cert_file is not None:
            where = f"{self.name_of('cert_file')} {self._cert_file}"
            if self._key_file is not None:
                where += f", {self.name_of('key_file')} {self._key_file}"
            try:
                load_certificate(context, self._cert_file, self._key_file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{where}: {error}") from error
        return context


@functools.cache
def _system_context(*, with_http2: bool) -> ssl.SSLContext:
    """Made once for all, as it reads the system's authorities."""
    return _context(None, with_http2=with_http2)


def _context(ca_file: str | None, *, with_http2: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the default of some builds of Python is OpenSSL's
    if with_http2:
        context.set_alpn_protocols(["h2", "http/1.1"])
    return context
