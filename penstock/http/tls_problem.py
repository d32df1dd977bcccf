"""What is wrong with TLS, in words that say what to change."""

from __future__ import annotations

import ssl

_OTHER_NAME = frozenset({62, 63, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH, _EMAIL_MISMATCH and _IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""
_NO_AUTHORITY = frozenset({2, 18, 19, 20, 21})
"""X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT, _DEPTH_ZERO_SELF_SIGNED_CERT, _SELF_SIGNED_CERT_IN_CHAIN,
_UNABLE_TO_GET_ISSUER_CERT_LOCALLY, _UNABLE_TO_VERIFY_LEAF_SIGNATURE."""
_NO_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"}
    | {"RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE", "BAD_RECORD_TYPE"}
)
"""Reasons of OpenSSL for an answer that is no record of TLS."""
ALERT = b"\x15\x03"
"""Begin of a TLS alert, with which a server answers what is no TLS."""


def tls_problem(
    error: BaseException, *, plain: str = "http://", authority: str = "", name: str = ""
) -> str | None:
    """What is wrong with TLS; None: ``error``, and what caused it, is about something else. ``plain`` is the
    URL's begin without TLS; ``authority`` and ``name`` say how another authority is trusted, and another name
    expected."""
    found = _ssl_error(error)
    if found is None:
        return None
    if isinstance(found, ssl.SSLCertVerificationError):
        told = (found.verify_message or str(found)).rstrip(".")
        if found.verify_code in _OTHER_NAME:
            return f"TLS: the certificate is not for this name: {told}{name and f'; {name}'}"
        if found.verify_code in _NO_AUTHORITY:
            return f"TLS: the certificate's authority is not trusted: {told}{authority and f'; {authority}'}"
        return f"TLS: the certificate is not accepted: {told}"
    reason = found.reason or ""
    if reason in _NO_TLS:
        return f"TLS: the server does not speak it here ({_words(reason)}): {plain} instead?"
    return f"TLS: {_words(reason) or str(found) or 'the handshake failed'}"


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ssl.SSLError):
        seen = seen.__cause__ or seen.__context__
    return seen


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")
