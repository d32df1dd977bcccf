"""Who may use the server: API keys, and who may do what changes it for everybody."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from hashlib import sha256

from penstock.http.asgi import request_header
from penstock.http.errors import ApiError
from penstock.http.sink import Scope

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Routes that need no key: probes have none."""


ADMINISTRATIVE = frozenset(
    {"/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile"}
)
ADMINISTRATIVE_PREFIXES = ("/admin/", "/debug/")

_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})
"""Headers that proxies add: the client is somewhere else."""


class Keys:
    """The keys that clients may present; without any, everybody is let in.

    Keys are kept and compared as digests, which all have one length, and a key is compared with every one
    of them: the time a refusal takes says nothing about any key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, path: str, scope: Scope) -> None:
        """Lets a request for ``path`` pass, or raises ApiError."""
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, key = (request_header(scope, b"authorization") or "").partition(" ")
        if not scheme:  # Anthropic's clients
            scheme, key = "bearer", request_header(scope, b"x-api-key") or ""
        presented = sha256(key.strip().encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if scheme.lower() == "bearer" and any(matches):
            return
        problem = "The API key is not valid" if key else "An API key is needed"
        raise ApiError(
            401,
            f"{problem}: send one of this server's as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers=[(b"www-authenticate", b"Bearer")],
        )


def is_administrative(path: str) -> bool:
    return path in ADMINISTRATIVE or path.startswith(ADMINISTRATIVE_PREFIXES)


def check_local(path: str, scope: Scope, *, unix_socket: bool) -> None:
    """Of a server without keys: administrative routes are for its own machine. Raises ApiError.

    The client is there when it connects from a loopback address, or when the server listens on a
    ``unix_socket`` (whose permissions say who may connect). A request that a proxy passes on, or that a page
    in a browser makes, is not its own.
    """
    if not is_administrative(path):
        return
    names = {name for name, _ in scope["headers"]}
    if b"origin" not in names and not names & _FORWARDED and (unix_socket or _is_loopback(scope["client"])):
        return
    raise ApiError(
        403,
        f"{path} changes or shows the server itself. Without API keys (--api-key-file) it answers only "
        "programs on the server's own machine, without a proxy in between.",
        code="not_local",
    )


def _is_loopback(client: tuple[str, int] | None) -> bool:
    """None: a connection that is gone already."""
    if client is None:
        return False
    address = ipaddress.ip_address(client[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
