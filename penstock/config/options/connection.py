"""Options of commands that ask a running server: ``chat``, ``complete`` and ``status``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from penstock.config.describe import ALLOWED_KEY, Key, option, option_group

ALLOWED_URL = "http://HOST:PORT or https://HOST:PORT, with or without /v1"

ReadTimeout: TypeAlias = Annotated[
    float, option("Maximum time without data from the server, in seconds.", "Server", gt=0)
]


@option_group
class ConnectionOptions:
    """Which server is asked, and how long it may take."""

    url: Annotated[
        str,
        option(
            "URL of the server or gateway, with or without /v1. Certificates: SSL_CERT_FILE names those to "
            "trust.",
            "Server",
            pattern=r"^https?://[^/]+",
            allowed=ALLOWED_URL,
        ),
    ] = "http://127.0.0.1:8000"
    api_key: Annotated[
        Key | None,
        option("API key, sent as a bearer token.", "Server", secret=True, allowed=ALLOWED_KEY),
    ] = None
    timeout: ReadTimeout = 600.0
