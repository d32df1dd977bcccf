"""Checks API keys, and restricts administrative routes of a server without keys to local clients."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from urllib.parse import unquote_to_bytes

from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Routes that need no key: health probes have none."""

ADMINISTRATIVE = frozenset(
    {
        "/reset_prefix_cache",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/abort_requests",
        "/flush_cache",
        "/init_weight_transfer",
        "/init_weight_transfer_engine",
        "/update_weights",
        "/weight_version",
        "/weights_checksum",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
ADMINISTRATIVE_PREFIXES = ("/admin/", "/debug/")

GOOGLE_KEY = b"x-goog-api-key"
KEY_HEADERS = (b"x-api-key", b"api-key", GOOGLE_KEY)
"""Headers with a key alone, as Anthropic's, Azure's and Google's clients send it; used without
Authorization."""
QUERY_KEY_ROUTES = ("/v1beta/", "/v1/models/")
"""Routes that take a key in their query, as Google's API does."""
CLIENT_KEYS = (b"authorization", *KEY_HEADERS)
"""Headers that may have a client's key."""

_REFUSED = [(b"www-authenticate", b"Bearer"), (b"x-should-retry", b"false")]
"""Headers of a refusal. The second is for Claude Code, which would repeat the request for minutes, without a
word, before it says what is wrong."""

_TENANT = b"penstock tenant"
"""BLAKE2b's personalization for tenants: no other digest of a key equals one."""

_FORWARDED = frozenset({b"forwarded", b"x-real-ip", b"via"})
_FORWARDED_PREFIX = b"x-forwarded-"
"""Headers that proxies add: the client is on another machine."""


class Keys:
    """The server's API keys; without any, every client is allowed.

    Keys are stored and compared as SHA-256 digests, and every check compares all of them in constant time, so
    that the duration of a refusal reveals nothing about a key.
    """

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        """With ``admin_keys``, administrative routes need one of them; others take them as well."""
        self._digests = [key_digest(key) for key in dict.fromkeys(keys)]
        self._tenants = [tenant_of(digest) for digest in self._digests] if len(self._digests) > 1 else [None]
        self._admins = AdminKeys(admin_keys)

    def guards(self, path: str) -> bool:
        """Whether the route needs a key."""
        return bool(self._digests) or self._admins.guard(path)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Check the key of a request for ``path``; ``headers``: by name in lower case. Raises ApiError.

        The result is the key's tenant if there are several keys.
        """
        if not self.guards(path) or path in OPEN_PATHS:
            return None
        presented = presented_digest(headers)
        matches = [hmac.compare_digest(presented or b"", digest) for digest in self._digests]
        if self._admins.has(presented):
            return tenant_of(presented or b"")
        if not any(matches):
            raise invalid_key(presented)
        self._admins.refuse_client(path)
        return self._tenants[matches.index(True)]


class AdminKeys:
    """The keys of administrators; without any, every key opens the administrative routes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.digests = [key_digest(key) for key in dict.fromkeys(keys)]

    def guard(self, path: str) -> bool:
        """Whether the route needs one of these keys."""
        return bool(self.digests) and is_administrative(path)

    def has(self, presented: bytes | None) -> bool:
        matches = [hmac.compare_digest(presented or b"", digest) for digest in self.digests]
        return any(matches)

    def refuse_client(self, path: str) -> None:
        """Raises ApiError for a route that a client's key does not open."""
        if self.guard(path):
            raise ApiError(
                403,
                f"{path} changes or shows the server itself. It needs a key of an administrator "
                "(--admin-api-key-file).",
                code="not_admin",
            )


def with_query_key(path: str, target: bytes, headers: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The headers of a request, with the key that its query has."""
    if not path.startswith(QUERY_KEY_ROUTES) or b"key=" not in target:
        return headers
    for each in target.partition(b"?")[2].split(b"&"):
        name, _, value = each.partition(b"=")
        if name == b"key":
            return {**headers, GOOGLE_KEY: unquote_to_bytes(value)}
    return headers


def without_query_key(path: str, target: bytes) -> bytes:
    """A request's target without the key that its query has."""
    if not path.startswith(QUERY_KEY_ROUTES) or b"key=" not in target:
        return target
    route, _, query = target.partition(b"?")
    kept = b"&".join(each for each in query.split(b"&") if each.partition(b"=")[0] != b"key")
    return b"%b?%b" % (route, kept) if kept else route


def key_digest(key: str) -> bytes:
    """The SHA-256 digest of a key that an option or a file names."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def tenant_of(digest: bytes) -> str:
    """The tenant of a key: 32 characters that are the same for the same key in every process and after a
    restart, and do not reveal it."""
    return blake2b(digest, digest_size=16, person=_TENANT).hexdigest()


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that a request presents; empty, if not as a key should be; None: it presents none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if not scheme:
        scheme = b"bearer"
        key = next(filter(None, map(headers.get, KEY_HEADERS)), b"")
    if not key:
        return None
    return key.strip() if scheme.lower() == b"bearer" else b""


def presented_digest(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The SHA-256 digest of the key that a request presents; see :func:`presented_key`."""
    key = presented_key(headers)
    return sha256(key).digest() if key else key


def invalid_key(presented: bytes | None) -> ApiError:
    """The refusal of a request that presents a key that is none of the server's; see
    :func:`presented_digest`."""
    problem = "An API key is needed" if presented is None else "The API key is not valid"
    return ApiError(  # A message with "x-api-key" is no message to Claude Code, which shows its own.
        401,
        f"{problem}: send one of this server's as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers=_REFUSED,
    )


def refused_key(message: str, code: str) -> ApiError:
    """The refusal of a key that is known, or of a token, that is not good; RFC 6750 §3."""
    described = message.replace('"', "'").replace("\\", "/").encode("ascii", "replace")
    challenge = b'Bearer error="invalid_token", error_description="%b"' % described
    return ApiError(401, message, code=code, headers=[(b"www-authenticate", challenge), _REFUSED[1]])


def is_administrative(path: str) -> bool:
    """Whether a route changes or shows the server itself."""
    return path in ADMINISTRATIVE or path.startswith(ADMINISTRATIVE_PREFIXES)


def check_local(request: HttpRequest, *, unix_socket: bool | None, loopback: bool) -> None:
    """Restrict administrative routes of a server without keys to its own machine. Raises ApiError.

    A client is local if the server listens on a ``unix_socket``, whose permissions decide who may connect
    (None: it cannot listen on one), and with ``loopback`` also if it connects from a loopback address, from
    which a proxy may connect for clients elsewhere as well. Requests that say they were forwarded, or made by
    a web page, are never local.
    """
    path = request.path
    if not is_administrative(path):
        return
    trusted = unix_socket or (loopback and _is_loopback(request.client))
    if trusted and not any(map(_is_foreign, request.fields)):
        return
    over_uds = "" if unix_socket is None else "over a unix socket (--uds), or "
    raise ApiError(
        403,
        f"{path} changes or shows the server itself. It needs an API key (--api-key-file); without keys it "
        f"answers {over_uds}with --allow-loopback-admin programs on the server's own machine, but neither "
        "web pages nor what a proxy forwards.",
        code="not_local",
    )


def _is_foreign(header: bytes) -> bool:
    return header == b"origin" or header in _FORWARDED or header.startswith(_FORWARDED_PREFIX)


def _is_loopback(client: tuple[str, int] | None) -> bool:
    """``client`` is None if the connection is already closed."""
    if client is None:
        return False
    address = ipaddress.ip_address(client[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
