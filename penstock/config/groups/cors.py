"""Options of which pages of other origins a browser lets in."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option
from penstock.config.groups.http import HttpOptions


class CorsOptions(HttpOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of which pages of other origins a browser lets in."""

    allowed_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+)$")]] | None,
        option(
            "Origins whose pages may use the server, such as https://chat.example.com; * for every one. "
            "Default: none, a browser keeps others out.",
            "CORS",
        ),
    ] = None
    allowed_methods: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|[A-Z]+)$")]] | None,
        option("Methods that these pages may use; default: every one.", "CORS"),
    ] = None
    allowed_headers: Annotated[
        list[Annotated[str, Meta(pattern=r"^[!#-'*+.0-9A-Z^-z|~-]+$")]] | None,
        option("Headers that these pages may send; default: every one.", "CORS"),
    ] = None
    allow_credentials: Annotated[
        bool,
        option(
            "Let these pages use the cookies and certificates that a browser keeps for the server.", "CORS"
        ),
    ] = False
