"""The keys of the gateway's clients, with and without names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.config.watched_file import WatchedFile
from penstock.gateway.requests.caller import Caller
from penstock.http.access_keys import (
    OPEN_PATHS,
    AdminKeys,
    invalid_key,
    key_digest,
    presented_digest,
    tenant_of,
)
from penstock.http.errors import ApiError

RELOAD_INTERVAL_S = 1.0
"""Interval of checks whether the file has changed."""


class ClientKeys:
    """All keys; without any, every client is allowed. ``clock`` gives seconds.

    A client is found by the SHA-256 digest of the key that it presents: the time of a look-up says nothing
    about a key, but at most about digests.
    """

    def __init__(
        self,
        plain: Iterable[str],
        file: WatchedFile[dict[bytes, Caller]] | None,
        clock: Callable[[], float],
        admin_keys: Iterable[str] = (),
    ) -> None:
        """``plain``: keys without a name. Those of ``file``, which is read again as it changes, have one.
        ``admin_keys`` open the administrative routes, which take no other key then, and all others."""
        self._file = file
        self._clock = clock
        self.set_keys(plain, admin_keys)

    def set_keys(self, plain: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Requests need these keys from here on, or those of the file."""
        digests = list(dict.fromkeys(map(key_digest, plain)))
        # A server's only key tells nobody apart: clients are known by their addresses.
        alone = len(digests) == 1 and self._file is None
        self._plain = {digest: Caller("" if alone else tenant_of(digest)) for digest in digests}
        self._read_at = self._clock()
        self._clients = self._all()
        self._admins = AdminKeys(admin_keys)

    def guards(self, path: str) -> bool:
        """Whether the route needs a key."""
        return bool(self._clients) or self._admins.guard(path)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Check the key of a request for ``path``; None: none is needed. ``headers``: by name in lower case.
        Raises ApiError."""
        if self._file is not None and self._clock() - self._read_at >= RELOAD_INTERVAL_S:
            self._read_at = self._clock()
            self._clients = self._all()
        if not self.guards(path) or path in OPEN_PATHS:
            return None
        presented = presented_digest(headers)
        caller = self._clients.get(presented or b"")
        if self._admins.has(presented):
            return Caller(tenant_of(presented or b""))
        if caller is None:
            raise invalid_key(presented)
        self._admins.refuse_client(path)
        return caller

    @property
    def has_admins(self) -> bool:
        """Whether there are keys of administrators."""
        return bool(self._admins.digests)

    def check_admin(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Check that a request for ``path``, which needs a key, has one of an administrator. Raises
        ApiError."""
        self.check(path, headers)
        if not self._admins.has(presented_digest(headers)):
            raise ApiError(
                403,
                f"{path} concerns all servers. It needs a key of an administrator (--admin-api-key-file).",
                code="not_admin",
            )

    def _all(self) -> dict[bytes, Caller]:
        return self._plain if self._file is None else {**self._plain, **self._file.latest()}
