"""What every request to the servers of one pool is given: as whom it is sent, and where to.

It is applied where a request becomes bytes, on the connection to the server. So whoever sends one, to relay,
to retry, to copy or to ask something of the gateway's own, cannot send a server the key of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote_plus, unquote_to_bytes

from penstock.gateway.upstream.exchange import REPLACED
from penstock.http.access_keys import CLIENT_KEYS
from penstock.http.http2.header_blocks import encode_fields

CREDENTIALS = (*CLIENT_KEYS, b"cookie")
"""Headers by which clients prove who they are."""
OF_PROXIES = (
    b"forwarded",
    b"x-real-ip",
    b"x-forwarded-client-cert",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-prefix",
    b"x-forwarded-proto",
    b"x-forwarded-server",
)
"""Headers by which proxies say who clients are, and what is before the gateway."""
_REPLACES_VERSION = re.compile(r"(?:^|/)(?:v\d+[a-z0-9]*|deployments/[^/]+$)(?:/|$)").search
"""Matches the path of a URL whose servers want ``/chat/completions`` and so on right below it."""
_VERSION = b"/v1/"


class RequestForm:
    """Immutable; a key that changes makes another one."""

    __slots__ = (
        "_prefix",
        "_query",
        "_replaced_query",
        "_replaces_version",
        "_root",
        "block",
        "dropped",
        "fields",
        "lines",
        "rewrites",
    )

    def __init__(
        self,
        key: tuple[bytes, bytes] | None = None,
        *,
        without: Iterable[bytes] = (),
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        prefix: str = "",
        root_path: str = "",
    ) -> None:
        """``key``: the header that has the gateway's own key; None: the client's goes on. ``without``: names
        of headers of clients that do not go on. ``headers`` and ``query`` replace what clients send by these
        names; an empty value removes it. ``prefix``: the path of the servers' URLs; ``root_path``: one that
        clients may send, and that does not go on."""
        own = {name.lower().encode(): value.encode() for name, value in (headers or {}).items()}
        fields = [(name, value) for name, value in own.items() if value]
        dropped = {*REPLACED, *own, *without}
        if key is not None:
            dropped.update(CREDENTIALS, (key[0],))
            fields.append(key)
        self.dropped = frozenset(dropped)
        """Names of headers of a request that are not sent as they are."""
        self.fields: Sequence[tuple[bytes, bytes]] = tuple(fields)
        """Headers that are sent with each request."""
        self.lines = b"".join([b"%b: %b\r\n" % field for field in fields])
        """These, as HTTP/1.1 writes them."""
        self.block = encode_fields(fields)
        """These, as HTTP/2 writes them."""
        self._prefix, self._root = prefix.encode(), root_path.encode()
        self._replaces_version = _REPLACES_VERSION(prefix) is not None
        pairs = [(quote_plus(name), quote_plus(value)) for name, value in (query or {}).items() if value]
        self._query = "&".join([f"{name}={value}" for name, value in pairs]).encode()
        self._replaced_query = frozenset(name.encode() for name in query or ())
        self.rewrites = bool(prefix or query or root_path)
        """Whether targets are not sent as they are."""

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Headers as the server gets them, without those of the connection."""
        return [*(header for header in headers if header[0] not in self.dropped), *self.fields]

    def target(self, target: bytes) -> bytes:
        """Path and query that the server gets for those that a client, or the gateway, means."""
        path, _, query = target.partition(b"?")
        if self._root and path.startswith(self._root + b"/"):
            path = path[len(self._root) :]
        if self._prefix:
            if self._replaces_version and path.startswith(_VERSION):
                path = path[len(_VERSION) - 1 :]
            path = self._prefix + path
        if self._replaced_query:
            kept = [pair for pair in query.split(b"&") if pair and not self._replaces(pair)]
            query = b"&".join([*kept, self._query] if self._query else kept)
        return path + b"?" + query if query else path

    def _replaces(self, pair: bytes) -> bool:
        name = pair.partition(b"=")[0].replace(b"+", b" ")
        return unquote_to_bytes(name) in self._replaced_query


AS_GIVEN = RequestForm()
"""Requests are sent as they are."""
