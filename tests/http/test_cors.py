from __future__ import annotations

from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.http.cors import Cors
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest
from tests.http.requests import http_request

CHAT = "https://chat.example.com"


def cors(*origins: str, **options: Any) -> Cors:
    return Cors(ServeConfig(allowed_origins=list(origins) or None, **options))


def asked(method: str = "POST", **headers: str) -> HttpRequest:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return http_request(method, headers=named)


def preflight(origin: str = CHAT, method: str = "POST", **headers: str) -> HttpRequest:
    return asked("OPTIONS", origin=origin, access_control_request_method=method, **headers)


def test_without_allowed_origins_nothing_is_said() -> None:
    assert cors().reply_headers(asked(origin=CHAT)) == []
    assert cors().preflight(asked("OPTIONS")) is None


def test_without_allowed_origins_a_preflight_names_the_option() -> None:
    with pytest.raises(
        ApiError, match=f"The origin '{CHAT}' is not allowed by this server's --allowed-origins"
    ):
        cors().preflight(preflight())


def test_a_page_that_is_allowed_may_read_the_reply() -> None:
    headers = dict(cors(CHAT).reply_headers(asked(origin=CHAT)))
    assert headers[b"access-control-allow-origin"] == CHAT.encode()
    assert headers[b"vary"] == b"origin"
    assert b"retry-after-ms" in headers[b"access-control-expose-headers"]
    assert b"access-control-allow-credentials" not in headers


@pytest.mark.parametrize("sent", [{}, {"origin": "https://evil.example.com"}, {"origin": f"{CHAT}.evil.com"}])
def test_others_may_not_and_caches_are_told(sent: dict[str, str]) -> None:
    assert cors(CHAT).reply_headers(asked(**sent)) == [(b"vary", b"origin")]


def test_every_origin() -> None:
    headers = dict(cors("*").reply_headers(asked(origin=CHAT)))
    assert headers[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in headers
    assert cors("*").reply_headers(asked()) == []


def test_credentials_take_an_origin_by_name() -> None:
    headers = dict(cors(CHAT, allow_credentials=True).reply_headers(asked(origin=CHAT)))
    assert headers[b"access-control-allow-credentials"] == b"true"
    for origins in (["*"], [CHAT, "*"], None):
        with pytest.raises(ValueError, match="--allow-credentials"):
            ServeConfig(allowed_origins=origins, allow_credentials=True)


def test_a_preflight_grants_what_it_asks_for() -> None:
    answer = cors(CHAT).preflight(preflight(access_control_request_headers="authorization, content-type"))
    assert answer is not None
    assert dict(answer) == {
        b"access-control-allow-origin": CHAT.encode(),
        b"vary": b"origin",
        b"access-control-allow-methods": b"POST",
        b"access-control-allow-headers": b"authorization, content-type",
        b"access-control-max-age": b"600",
    }


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {"origin": CHAT, "access_control_request_method": "POST"}),
        ("OPTIONS", {"origin": CHAT}),
        ("OPTIONS", {"access_control_request_method": "POST"}),
    ],
)
def test_what_is_no_preflight(method: str, headers: dict[str, str]) -> None:
    assert cors(CHAT).preflight(asked(method, **headers)) is None


LIMITED = {"allowed_methods": ["GET"], "allowed_headers": ["Content-Type"]}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (preflight("http://chat.example.com"), "origin 'http://chat.example.com' .*--allowed-origins"),
        (preflight(method="POST"), "method 'POST' .*--allowed-methods"),
        (
            preflight(method="GET", access_control_request_headers="content-type,x-a"),
            "header 'x-a' .*--allowed-h",
        ),
    ],
)
def test_a_preflight_that_asks_for_more_is_told_why_not(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        cors(CHAT, **LIMITED).preflight(asked)
    assert caught.value.status == 403


def test_methods_and_headers_within_the_limits_in_any_case() -> None:
    asked = preflight(method="GET", access_control_request_headers="Content-type")
    assert cors(CHAT, **LIMITED).preflight(asked) is not None
    everything = {"allowed_methods": ["*"], "allowed_headers": ["*"]}
    assert cors(CHAT, **everything).preflight(preflight(access_control_request_headers="x-a")) is not None
