"""CORS options."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import ALLOWED_HEADER, HeaderName, option, option_group


@option_group
class CorsOptions:
    """CORS options."""

    allowed_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+)\Z")]] | None,
        option(
            "Origins allowed by CORS, such as https://chat.example.com; *: all. Default: none.",
            "CORS",
            allowed="SCHEME://HOST, SCHEME://HOST:PORT, null or *",
        ),
    ] = None
    allowed_methods: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|[A-Z]+)\Z")]] | None,
        option("Methods that CORS allows. Default: all.", "CORS", allowed="a method in capitals, or *"),
    ] = None
    allowed_headers: Annotated[
        list[HeaderName] | None,
        option("Request headers that CORS allows. Default: all.", "CORS", allowed=f"{ALLOWED_HEADER}, or *"),
    ] = None
    allow_credentials: Annotated[
        bool,
        option("Allow cross-origin requests with credentials (cookies, client certificates).", "CORS"),
    ] = False
