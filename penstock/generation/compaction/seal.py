"""Seals summaries of conversations, so that clients keep them and send them back unread and unchanged.

A sealed text is encrypted and authenticated, for one tenant: what was changed, or sealed with another key or
for another tenant, does not open. It is encrypted first and then authenticated, with what Python has:
SHAKE-256 of a secret and a random nonce is the key stream (FIPS 202: an extendable-output function), keyed
BLAKE2b (RFC 7693) authenticates nonce, tenant and cipher text.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode, urlsafe_b64encode

_PREFIX = "penstock-seal1."
_NONCE_BYTES = _TAG_BYTES = 24
MIN_KEY_BYTES = 32
MAX_SEALED = 1 << 20
"""Characters of a sealed text that are opened: a summary of 16,384 tokens has a tenth of them."""


class Seals:
    """Seals and opens texts with one key."""

    def __init__(self, key: bytes) -> None:
        """``key``: at least MIN_KEY_BYTES of secret bytes; all servers that open the same texts have the
        same."""
        self._stream_key = hashlib.blake2b(key, person=b"seal stream").digest()
        self._tag_key = hashlib.blake2b(key, person=b"seal tag").digest()

    def seal(self, text: str, tenant: str) -> str:
        """``text`` in a form that JSON need not escape, and that :meth:`open` opens for ``tenant`` alone."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hidden = self._hide(text.encode(), nonce)
        sealed = nonce + hidden + self._tag(nonce, hidden, tenant)
        return _PREFIX + urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str, tenant: str) -> str | None:
        """The text; None if it was not sealed with this key for this tenant, or was changed since."""
        if not sealed.startswith(_PREFIX) or len(sealed) > MAX_SEALED:
            return None
        try:
            data = b64decode(sealed[len(_PREFIX) :], b"-_", validate=True)
        except ValueError:
            return None
        nonce, hidden, tag = data[:_NONCE_BYTES], data[_NONCE_BYTES:-_TAG_BYTES], data[-_TAG_BYTES:]
        if len(data) < _NONCE_BYTES + _TAG_BYTES:
            return None
        if not hmac.compare_digest(tag, self._tag(nonce, hidden, tenant)):
            return None
        return self._hide(hidden, nonce).decode()

    def _hide(self, data: bytes, nonce: bytes) -> bytes:
        """``data`` combined with the key stream of ``nonce``; a second time gives ``data``."""
        stream = hashlib.shake_256(self._stream_key + nonce).digest(len(data))
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))

    def _tag(self, nonce: bytes, hidden: bytes, tenant: str) -> bytes:
        owner = hashlib.blake2b(tenant.encode()).digest()
        return hashlib.blake2b(nonce + owner + hidden, key=self._tag_key, digest_size=_TAG_BYTES).digest()
