"""Checks one token: a JSON Web Token that is signed (RFC 7519, RFC 8725)."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt
import msgspec

from penstock.gateway.admission.oidc.issuer_entry import ALGORITHMS, ClaimsError, IssuerEntry
from penstock.gateway.admission.oidc.signing_keys import SigningKeys
from penstock.gateway.requests.caller import Caller
from penstock.http.repeated_names import repeated_name

MAX_TOKEN_BYTES = 16 << 10
"""Of one token. Those with many groups have 8 KiB; a check takes 30 µs per KiB besides the signature."""
MAX_TIME = 1 << 40
"""Seconds; a time beyond it is wrong."""
TYPES = ("jwt", "at+jwt", "application/jwt", "application/at+jwt")
"""Kinds of tokens that say who is a client. One for a logout, for example, says ``logout+jwt``."""


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None
    typ: str | None = None
    crit: msgspec.Raw | None = None
    b64: msgspec.Raw | None = None


class _Claims(msgspec.Struct):
    """Those that are registered. Times are numbers, and nothing that has to become one."""

    exp: int | float
    iss: str
    aud: str | list[str]
    nbf: int | float | None = None
    iat: int | float | None = None


_header = msgspec.json.Decoder(_Header).decode
_claims = msgspec.json.Decoder(_Claims).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_jws = jwt.PyJWS(algorithms=ALGORITHMS)


class TokenRefused(Exception):
    """A token is not good. ``code``: why, one of a few; ``text``: ASCII without quotes, and without any text
    of the token."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class UnknownKeyError(TokenRefused):
    """The issuer's keys are not known, or not the one that has signed a token."""

    def __init__(self, issuer: str, code: str, text: str) -> None:
        super().__init__(code, text)
        self.issuer = issuer


@dataclass(frozen=True, slots=True)
class GoodToken:
    """A token that has been verified."""

    caller: Caller
    issuer: IssuerEntry
    expires: float
    """Unix time at which it is refused, in seconds."""


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Checks tokens of some issuers."""

    issuers: Mapping[str, IssuerEntry]
    keys: Callable[[str], SigningKeys | None]
    """The keys of an issuer; None: they are not known."""
    reserved: frozenset[str]
    """Names that no token may have."""

    def check(self, token: bytes, now: float) -> GoodToken:
        """Raises TokenRefused."""
        if len(token) > MAX_TOKEN_BYTES:
            raise _malformed(f"is longer than {MAX_TOKEN_BYTES} bytes")
        header, claims = _parts(token)
        if header.alg not in ALGORITHMS:
            raise TokenRefused(
                "token_algorithm", "The token is not signed with an algorithm that is allowed."
            )
        if header.typ is not None and header.typ.lower() not in TYPES:
            raise _malformed("is of another kind than JWT and at+jwt")
        issuer = self.issuers.get(claims.iss)
        if issuer is None:
            raise TokenRefused("token_issuer", "The issuer of the token is none of those of this gateway.")
        if header.alg not in (issuer.algorithms or ALGORITHMS):
            raise TokenRefused(
                "token_algorithm", "The token is not signed with an algorithm that is allowed."
            )
        _verify(token, header.alg, self._key(header, claims.iss))
        _check_claims(claims, issuer, now)
        caller = self._caller(token, issuer)
        return GoodToken(caller, issuer, claims.exp + issuer.leeway)

    def _key(self, header: _Header, issuer: str) -> Any:
        keys = self.keys(issuer)
        if keys is None:
            raise UnknownKeyError(
                issuer, "token_keys_unavailable", "The keys of the issuer of the token cannot be fetched."
            )
        key = keys.find(header.alg, header.kid)
        if key is None:
            raise UnknownKeyError(
                issuer, "token_unknown_key", "The token is signed with a key that its issuer does not list."
            )
        return key

    def _caller(self, token: bytes, issuer: IssuerEntry) -> Caller:
        payload = _decode(token.split(b".")[1])
        try:
            claims = msgspec.json.decode(payload)
        except ValueError:  # what nobody has looked at so far is not UTF-8
            raise _malformed("is not JSON in base64url") from None
        fields = _fields(payload)
        paths = issuer.claims.paths()
        if repeated_name(payload, fields) is not None or any(_is_ambiguous(fields, path) for path in paths):
            raise TokenRefused("token_claims", "The token has a claim twice.")
        try:
            caller = issuer.caller(claims)
        except ClaimsError as error:
            raise TokenRefused("token_claims", f"The token cannot be used: {error}.") from None
        if caller is None:
            raise TokenRefused("token_groups", "The token has none of the groups that may use this gateway.")
        if caller.name in self.reserved:
            raise TokenRefused("token_claims", "The token has the name of a key of the keys file.")
        return caller


def _parts(token: bytes) -> tuple[_Header, _Claims]:
    """Header and claims, which nobody has verified. Raises TokenRefused."""
    parts = token.split(b".")
    if len(parts) != 3:
        raise _malformed("does not have three parts")
    try:
        header, claims = _header(_decode(parts[0])), _claims(_decode(parts[1]))
    except msgspec.ValidationError:
        raise _malformed("lacks alg, exp, iss or aud, or has one of another type than JWTs do") from None
    except (ValueError, RecursionError):  # also of msgspec and binascii
        raise _malformed("is not JSON in base64url") from None
    if header.crit is not None or header.b64 is not None:
        raise _malformed("has extensions (crit, b64), of which none are supported")
    return header, claims


def _is_ambiguous(fields: dict[str, msgspec.Raw], path: str) -> bool:
    """Whether a claim with the claim at ``path`` within it has a name twice."""
    for step in path.split(".")[:-1]:
        found = bytes(fields.get(step, b""))
        if not found.startswith(b"{"):
            return False
        fields = _fields(found)
        if repeated_name(found, fields) is not None:
            return True
    return False


def _decode(part: bytes) -> bytes:
    """Raises ValueError."""
    try:
        return urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _verify(token: bytes, algorithm: str, key: Any) -> None:
    """Check the signature. Raises TokenRefused."""
    try:
        _jws.decode_complete(token, key, algorithms=[algorithm])
    except jwt.InvalidSignatureError:
        raise TokenRefused("token_signature", "The signature of the token is not valid.") from None
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise _malformed("is not as JWTs are") from None


def _check_claims(claims: _Claims, issuer: IssuerEntry, now: float) -> None:
    """Raises TokenRefused."""
    times = [each for each in (claims.exp, claims.nbf, claims.iat) if each is not None]
    if not all(0 <= each <= MAX_TIME for each in times):
        raise TokenRefused("token_claims", "The token has a time that is out of range.")
    audiences = [claims.aud] if isinstance(claims.aud, str) else claims.aud
    if set(audiences).isdisjoint(issuer.audiences):
        raise TokenRefused("token_audience", "The token is for another audience than this gateway.")
    if now >= claims.exp + issuer.leeway:
        raise TokenRefused("token_expired", "The token has expired.")
    if max(claims.nbf or 0, claims.iat or 0) > now + issuer.leeway:
        raise TokenRefused("token_not_yet_valid", "The token is not valid yet.")


def _malformed(problem: str) -> TokenRefused:
    return TokenRefused("token_malformed", f"The token {problem}.")
