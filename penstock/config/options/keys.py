"""Options of who may use ``serve`` and ``gateway``, and who administers them."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group

GROUP = "HTTP server"


@option_group
class KeyOptions:
    """Keys of clients and administrators."""

    api_key: Annotated[
        list[str] | None,
        option(
            "API keys; clients must send one of them as a bearer token. Default: no authentication.",
            GROUP,
            secret=True,
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        option("File with additional API keys, one per line; lines that start with # are comments.", GROUP),
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        option(
            "Keys of administrators: administrative routes need one of them instead of a client's key, or of "
            "a local connection. They open all other routes, too. Default: every key opens all routes.",
            GROUP,
            secret=True,
        ),
    ] = None
    admin_api_key_file: Annotated[
        str | None,
        option("File with further keys of administrators, written as --api-key-file.", GROUP),
    ] = None
    allow_loopback_admin: Annotated[
        bool,
        option(
            "Without API keys, allow administrative routes (/debug/..., of a server also /sleep and "
            "/admin/...) to programs on this machine: connections from a loopback address. A proxy on this "
            "machine that adds no header such as X-Forwarded-For allows them to its clients, too. Default: "
            "over a server's unix socket only.",
            GROUP,
        ),
    ] = False
