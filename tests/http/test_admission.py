from __future__ import annotations

from penstock.http.admission import unavailable


def test_a_server_that_cannot_serve() -> None:
    error = unavailable("Closing.", "draining")
    assert (error.status, error.type, error.code) == (503, "ServiceUnavailableError", "draining")
    assert dict(error.headers) == {b"retry-after": b"1", b"retry-after-ms": b"1000"}
