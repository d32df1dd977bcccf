"""The keys of the gateway's clients, with and without names."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.config.watched_file import WatchedFile
from penstock.gateway.admission.clients_file import KnownClients
from penstock.gateway.admission.oidc.token_pending import TokenPending
from penstock.gateway.requests.caller import Caller
from penstock.http.access_keys import (
    OPEN_PATHS,
    AdminKeys,
    invalid_key,
    key_digest,
    presented_digest,
    presented_key,
    refused_key,
    tenant_of,
)
from penstock.http.errors import ApiError

if TYPE_CHECKING:  # imported where there are issuers of tokens
    from penstock.gateway.admission.oidc.token_clients import TokenClients

log = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
"""Interval of checks whether the file has changed, and so the most by which a change is late."""
_REFUSALS = {
    "revoked": "The API key has been revoked.",
    "expired": "The API key has expired.",
    "not_yet_valid": "The API key is not valid yet.",
}


class ClientKeys:
    """All keys; without any, every client is allowed. ``clock`` gives Unix times, in seconds.

    A client is found by the SHA-256 digest of the key that it presents: the time of a look-up says nothing
    about a key, but at most about digests. What is looked up are the keys that are good now; they are chosen
    anew when the file has changed, and when one begins or expires.
    """

    def __init__(
        self,
        plain: Iterable[str],
        file: WatchedFile[KnownClients] | None,
        clock: Callable[[], float] = time.time,
        admin_keys: Iterable[str] = (),
    ) -> None:
        """``plain``: keys without a name. Those of ``file``, which is read again as it changes, have one.
        ``admin_keys`` open the administrative routes, which take no other key then, and all others."""
        self._file = file
        self._clock = clock
        self._known = KnownClients({}) if file is None else file.latest()
        self._tokens: TokenClients | None = None
        """None: there are no issuers of tokens."""
        self._plain: dict[bytes, Caller] = {}
        self._clients: dict[bytes, Caller] = {}
        self._refused: dict[bytes, str] = {}
        """Why keys of the file are not good now."""
        self._changes_at = math.inf
        """When one of them begins or expires."""
        self.set_keys(plain, admin_keys)

    def set_keys(self, plain: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Requests need these keys from here on, or those of the file."""
        digests = list(dict.fromkeys(map(key_digest, plain)))
        # A server's only key tells nobody apart: clients are known by their addresses.
        alone = len(digests) == 1 and self._file is None
        self._plain = {digest: Caller("" if alone else tenant_of(digest)) for digest in digests}
        self._admins = AdminKeys(admin_keys)
        self._choose()

    def guards(self, path: str) -> bool:
        """Whether the route needs a key. One is needed also where all have expired."""
        return self._file is not None or bool(self._plain) or self._admins.guard(path)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Check the key of a request for ``path``; None: none is needed. ``headers``: by name in lower case.
        Raises ApiError: TokenPending for a token that is new."""
        if not self.guards(path) or path in OPEN_PATHS:
            return None
        presented = presented_digest(headers)
        caller = self._clients.get(presented or b"")
        if self._admins.has(presented):
            return Caller(tenant_of(presented or b""))
        if caller is None:
            caller = self._of_token(presented, headers)
        self._admins.refuse_client(path)
        return caller

    async def checked(self, path: str, headers: Mapping[bytes, bytes]) -> Caller | None:
        """What :meth:`check` says, of a token that is new once it is known. Raises ApiError."""
        try:
            return self.check(path, headers)
        except TokenPending as pending:
            await pending.wait()
            return self.check(path, headers)

    def find(self, digest: bytes) -> Caller:
        """The client of the key with this SHA-256. Raises ApiError if none is good now."""
        caller = self._clients.get(digest)
        return self._of_token(digest, {}) if caller is None else caller

    async def follow(self) -> None:
        """Keep to the file and to the time, until it is cancelled."""
        if self._file is None:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        self._follow_issuers()
        try:
            while True:
                await asyncio.sleep(max(0.0, min(RELOAD_INTERVAL_S, self._changes_at - self._clock())))
                try:
                    # In a thread: a large file takes long to read, and a disk may not answer.
                    self.take_over(await loop.run_in_executor(None, self._file.latest))
                    self._follow_issuers()
                except Exception:
                    log.exception("the clients' keys stay as they are")
        finally:
            if self._tokens is not None:
                await self._tokens.close()

    def take_over(self, known: KnownClients) -> None:
        """These are the keys of the file from here on."""
        if known is not self._known or self._clock() >= self._changes_at:
            self._known = known
            self._choose()

    def _follow_issuers(self) -> None:
        known = self._known
        if known.issuers and self._tokens is None:
            from penstock.gateway.admission.oidc.token_clients import TokenClients

            self._tokens = TokenClients(self._clock)
        if self._tokens is not None:
            self._tokens.configure(known.issuers, known.names, known.shared)

    def _choose(self) -> None:
        """Choose the keys that are good now."""
        now = self._clock()
        clients, refused, changes_at = dict(self._plain), {}, math.inf
        for digest, grant in self._known.grants.items():
            if refusal := grant.refusal(now):
                refused[digest] = refusal
            else:
                clients[digest] = grant.caller
            if not grant.revoked:
                later = (each for each in (grant.begins, grant.expires) if each > now)
                changes_at = min(changes_at, *later, math.inf)
        self._clients, self._refused, self._changes_at = clients, refused, changes_at

    def _of_token(self, presented: bytes | None, headers: Mapping[bytes, bytes]) -> Caller:
        """The client of what is no key that is good. Raises ApiError."""
        if refusal := self._refused.get(presented or b""):
            raise refused_key(_REFUSALS[refusal], f"key_{refusal}")
        if self._tokens is not None and (token := presented_key(headers)):
            caller = self._tokens.find(presented or b"", token)
            if caller is not None:
                return caller
        raise invalid_key(presented)

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
