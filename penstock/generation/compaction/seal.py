"""Seals summaries of conversations, so that clients keep them and send them back unread and unchanged.

A sealed text is encrypted and authenticated, for one tenant: what was changed, or sealed with another key or
for another tenant, does not open.
"""

from __future__ import annotations

import hashlib
import secrets
from base64 import b64decode, urlsafe_b64encode
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

_PREFIX = "penstock-seal1."
_NONCE_BYTES = 12
MIN_KEY_BYTES = 32
MAX_SEALED = 1 << 20
"""Characters of a sealed text that are opened: a summary of 16,384 tokens has a tenth of them."""


class Seals:
    """Seals and opens texts with one key."""

    def __init__(self, key: bytes) -> None:
        """``key``: at least MIN_KEY_BYTES of secret bytes; all servers that open the same texts have the
        same."""
        self._key = hashlib.blake2b(key, digest_size=32, person=b"penstock seal").digest()

    @cached_property
    def _cipher(self) -> ChaCha20Poly1305:
        # Imported for the first summary: it takes 20 ms, which every start would pay for.
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        return ChaCha20Poly1305(self._key)

    def seal(self, text: str, tenant: str) -> str:
        """``text`` in a form that JSON need not escape, and that :meth:`open` opens for ``tenant`` alone."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), tenant.encode())
        return _PREFIX + urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str, tenant: str) -> str | None:
        """The text; None if it was not sealed with this key for this tenant, or was changed since."""
        from cryptography.exceptions import InvalidTag

        if not sealed.startswith(_PREFIX) or len(sealed) > MAX_SEALED:
            return None
        try:
            data = b64decode(sealed[len(_PREFIX) :], b"-_", validate=True)
            opened = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], tenant.encode())
        except (ValueError, InvalidTag):
            return None
        return opened.decode()
