"""What errors of TLS say."""

from __future__ import annotations

import ssl

import pytest

from penstock.http.tls_problem import tls_problem


def refused(code: int, message: str) -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


def broken(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            refused(20, "unable to get local issuer certificate"),
            "TLS: the certificate's authority is not trusted: unable to get local issuer certificate; --ca",
        ),
        (refused(18, "self-signed certificate"), "not trusted: self-signed certificate; --ca"),
        (
            refused(62, "Hostname mismatch, not valid for 'a'."),
            "for this name: Hostname mismatch, not valid for 'a'; --name",
        ),
        (refused(64, "IP address mismatch"), "not for this name: IP address mismatch; --name"),
        (
            refused(10, "certificate has expired"),
            "is not accepted: certificate has expired",
        ),
        (broken("WRONG_VERSION_NUMBER"), "does not speak it here (wrong version number): redis:// instead?"),
        (broken("RECORD_LAYER_FAILURE"), "does not speak it here (record layer failure): redis:// instead?"),
        (broken("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "TLS: tlsv13 alert certificate required"),
    ],
)
def test_what_is_wrong_and_what_to_change(error: ssl.SSLError, text: str) -> None:
    """Also where the error is the cause of another one."""
    outer = ConnectionError("no connection")
    outer.__cause__ = OSError()
    outer.__cause__.__context__ = error
    for each in (error, outer):
        found = tls_problem(each, plain="redis://", authority="--ca", name="--name")
        assert found is not None
        assert found.startswith("TLS: ")
        assert found.endswith(text)


def test_other_errors_are_none_of_it() -> None:
    assert tls_problem(ConnectionRefusedError("no")) is None
