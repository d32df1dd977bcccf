"""Parameters of administrative requests: in the query, in the body, in both."""

from __future__ import annotations

import asyncio

import pytest

from penstock.http.errors import ApiError
from penstock.http.operation_options import (
    DEFAULT_TIMEOUT_S,
    operation_options,
    read_parameter_body,
    read_parameters,
)
from tests.http.requests import http_request


@pytest.mark.parametrize(
    ("query", "body", "parameters"),
    [
        (b"", b"", {}),
        (b"mode=keep&timeout=", b"", {"mode": "keep", "timeout": ""}),
        (
            b"",
            b'{"mode": "keep", "level": 1, "timeout": 2.5}',
            {"mode": "keep", "level": "1", "timeout": "2.5"},
        ),
        (b"mode=keep", b'{"mode": "keep", "level": null}', {"mode": "keep"}),
        (b"mode=%C3%A9", b"{}", {"mode": "é"}),
    ],
)
def test_where_they_may_be(query: bytes, body: bytes, parameters: dict[str, str]) -> None:
    assert read_parameters(http_request("POST", b"/pause?" + query), body) == parameters


@pytest.mark.parametrize(
    ("query", "body", "message"),
    [
        (b"mode=keep&mode=keep", b"", "mode is given twice."),
        (b"mode=keep", b'{"mode": "wait"}', "mode is 'keep' in the query and 'wait' in the body."),
        (b"other=1", b"{}", "/pause takes mode, timeout in its query, not 'other'."),
        (b"mode=keep", b'{"other": 1}', "/pause takes mode, timeout in its body, not 'other'."),
        (b"", b'{"mode": "keep", "mode": "abort"}', "mode is given twice."),
        (b"", b'{"mode":"keep","m\\u006fde":"keep"}', "mode is given twice."),
        (b"", b'{"mode": true}', "mode: expected"),
        (b"", b'["keep"]', "the request body: expected an object"),
        (b"", b"{", "JSON"),
        (b"", b'"\\ud800"', "half of a surrogate pair"),
        (b"timeout=soon", b"", "timeout is 'soon', not 1 to 3600 seconds."),
        (b"", b'{"timeout": 0}', "timeout is '0', not 1 to 3600 seconds."),
    ],
)
def test_what_is_wrong_is_named(query: bytes, body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        operation_options(http_request("POST", b"/pause?" + query), "mode", body=body)
    assert refusal.value.status == 400
    assert message in refusal.value.message


def test_a_key_and_a_time_are_made_up() -> None:
    first, second = (operation_options(http_request("POST", b"/pause")) for _ in range(2))
    assert (first.timeout_s, first.parameters) == (DEFAULT_TIMEOUT_S, {})
    assert first.key != second.key
    given = operation_options(http_request("POST", b"/pause", [(b"idempotency-key", b"k")]))
    assert given.key == "k"
    with pytest.raises(ApiError, match="0 characters, 1 to 255"):
        operation_options(http_request("POST", b"/pause", [(b"idempotency-key", b"")]))


@pytest.mark.parametrize("kind", [b"application/json", b"application/x-www-form-urlencoded"])
def test_an_empty_body_may_have_any_type(kind: bytes) -> None:
    request = http_request("POST", b"/pause", [(b"content-type", kind), (b"content-length", b"0")])
    assert asyncio.run(read_parameter_body(request)) == b""
