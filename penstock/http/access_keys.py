"""Checks API keys, and restricts administrative routes to local clients of a server without keys."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from hashlib import blake2b, sha256

from penstock.http.asgi import first_headers, request_header
from penstock.http.errors import ApiError
from penstock.http.sink import Scope

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Routes that need no key: health probes have none."""

ADMINISTRATIVE = frozenset(
    {"/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile"}
)
ADMINISTRATIVE_PREFIXES = ("/admin/", "/debug/")

KEY_HEADERS = (b"x-api-key", b"api-key")
"""Headers with a key alone, as Anthropic's and Azure's clients send it; used without Authorization."""
CLIENT_KEYS = (b"authorization", *KEY_HEADERS)
"""Headers that may have a client's key."""

_REFUSED = [(b"www-authenticate", b"Bearer"), (b"x-should-retry", b"false")]
"""Headers of a refusal. The second is for Claude Code, which would repeat the request for minutes, without a
word, before it says what is wrong."""

_TENANT = b"penstock tenant"
"""BLAKE2b's personalization for tenants: no other digest of a key equals one."""

_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})
"""Headers that proxies add: the client is on another machine."""


class Keys:
    """The server's API keys; without any, every client is allowed.

    Keys are stored and compared as SHA-256 digests, and every check compares all of them in constant time, so
    that the duration of a refusal reveals nothing about a key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in dict.fromkeys(keys)]
        self._tenants = [_tenant(digest) for digest in self._digests] if len(self._digests) > 1 else [None]

    def check(self, path: str, scope: Scope) -> str | None:
        """Check the key of a request for ``path``. Raises ApiError.

        The result is the key's tenant if there are several keys: 32 characters that are the same for the same
        key in every process and after a restart, and do not reveal it.
        """
        if not self._digests or path in OPEN_PATHS:
            return None
        scheme, _, key = (request_header(scope, b"authorization") or "").partition(" ")
        if not scheme:
            scheme = "bearer"
            key = next(filter(None, (request_header(scope, name) for name in KEY_HEADERS)), "")
        presented = sha256(key.strip().encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if scheme.lower() == "bearer" and any(matches):
            return self._tenants[matches.index(True)]
        problem = "The API key is not valid" if key else "An API key is needed"
        raise ApiError(  # A message with "x-api-key" is no message to Claude Code, which shows its own.
            401,
            f"{problem}: send one of this server's as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers=_REFUSED,
        )


def _tenant(digest: bytes) -> str:
    return blake2b(digest, digest_size=16, person=_TENANT).hexdigest()


def is_administrative(path: str) -> bool:
    """Whether a route changes or shows the server itself."""
    return path in ADMINISTRATIVE or path.startswith(ADMINISTRATIVE_PREFIXES)


def check_local(path: str, scope: Scope, *, unix_socket: bool) -> None:
    """Restrict administrative routes of a server without keys to its own machine. Raises ApiError.

    A client is local if it connects from a loopback address, or if the server listens on a ``unix_socket``,
    whose permissions decide who may connect. Requests that a proxy forwards or a web page makes are not
    local.
    """
    if not is_administrative(path):
        return
    names = first_headers(scope).keys()
    if b"origin" not in names and not names & _FORWARDED and (unix_socket or _is_loopback(scope["client"])):
        return
    raise ApiError(
        403,
        f"{path} changes or shows the server itself. Without API keys (--api-key-file) it answers only "
        "programs on the server's own machine, without a proxy in between.",
        code="not_local",
    )


def _is_loopback(client: tuple[str, int] | None) -> bool:
    """``client`` is None if the connection is already closed."""
    if client is None:
        return False
    address = ipaddress.ip_address(client[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
