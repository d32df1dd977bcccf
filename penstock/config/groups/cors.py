"""Options of which pages of other origins a browser lets in."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option

AllowedOrigins = Annotated[
    list[Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+)$")]] | None,
    option(
        "Origins whose pages may use the server, such as https://chat.example.com; * for every one. "
        "Default: none, a browser keeps others out.",
        "CORS",
    ),
]

AllowedMethods = Annotated[
    list[Annotated[str, Meta(pattern=r"^(\*|[A-Z]+)$")]] | None,
    option("Methods that these pages may use; default: every one.", "CORS"),
]

AllowedHeaders = Annotated[
    list[Annotated[str, Meta(pattern=r"^[!#-'*+.0-9A-Z^-z|~-]+$")]] | None,
    option("Headers that these pages may send; default: every one.", "CORS"),
]

AllowCredentials = Annotated[
    bool,
    option("Let these pages use the cookies and certificates that a browser keeps for the server.", "CORS"),
]
