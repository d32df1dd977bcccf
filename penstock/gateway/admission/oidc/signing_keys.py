"""The public keys of an issuer, of a JSON Web Key Set (RFC 7517)."""

from __future__ import annotations

from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

MAX_KEYS = 100
"""Keys of a set. Issuers have two or three."""
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
"""Shorter ones are not safe (RFC 7518 §3.3); with longer ones a check takes milliseconds."""

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey
_ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
}
"""By type or curve. A key is never used with any other: not as the secret of HS256, for one."""


class SigningKeys:
    """Public keys by their id and by an algorithm that they are for."""

    def __init__(self, text: bytes) -> None:
        """``text`` is a JSON Web Key Set. Keys that are not for signatures, or of a kind that is not
        supported, are left out. Raises ValueError."""
        try:
            said = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            raise ValueError("it is not JSON") from None
        listed = said.get("keys") if isinstance(said, dict) else None
        if not isinstance(listed, list):
            raise ValueError("it is no JSON Web Key Set: an object with a list of keys")
        if len(listed) > MAX_KEYS:
            raise ValueError(f"it has more than {MAX_KEYS} keys")
        self._keys: dict[tuple[str, str], PublicKey] = {}
        self._unnamed: dict[str, list[PublicKey]] = {}
        """All keys, by algorithm."""
        self.count = 0
        for jwk in listed:
            if isinstance(jwk, dict):
                self._add(jwk)
        if not self.count:
            raise ValueError(
                "it has no key that can check a signature; supported are RSA of 2,048 to 8,192 bits, P-256, "
                "P-384, P-521 and Ed25519"
            )

    def find(self, algorithm: str, id: str | None) -> PublicKey | None:
        """The key for a signature; without an ``id`` the only one for the algorithm, if there is only one."""
        if id is not None:
            return self._keys.get((id, algorithm))
        keys = self._unnamed.get(algorithm, [])
        return keys[0] if len(keys) == 1 else None

    def _add(self, jwk: dict[str, Any]) -> None:
        kind, curve, id = jwk.get("kty"), jwk.get("crv"), jwk.get("kid")
        algorithms = _ALGORITHMS.get(str(kind if kind == "RSA" else curve), ())
        stated = jwk.get("alg")
        if stated is not None:
            algorithms = (stated,) if stated in algorithms else ()
        operations = jwk.get("key_ops")
        is_for_checks = not isinstance(operations, list) or "verify" in operations
        if not algorithms or jwk.get("use", "sig") != "sig" or not is_for_checks:
            return
        public = {name: value for name, value in jwk.items() if name in ("kty", "crv", "n", "e", "x", "y")}
        try:
            key = jwt.PyJWK(public, algorithms[0]).key
        except (jwt.PyJWTError, ValueError, TypeError, AttributeError):
            return
        if isinstance(key, RSAPublicKey) and not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
            return
        self.count += 1
        for algorithm in algorithms:
            self._unnamed.setdefault(algorithm, []).append(key)
            if isinstance(id, str):
                self._keys.setdefault((id, algorithm), key)
