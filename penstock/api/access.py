"""Who may use the server: API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from .errors import ApiError
from .http import request_header
from .sink import Scope

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Routes that need no key: probes have none."""


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
