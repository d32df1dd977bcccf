"""As whom and where to requests are sent."""

from __future__ import annotations

import pytest

from penstock.gateway.upstream.exchange import UpstreamRequest
from penstock.gateway.upstream.http1_connection import request_bytes
from penstock.gateway.upstream.request_form import AS_GIVEN, CREDENTIALS, RequestForm

CLIENTS = [
    (b"authorization", b"Bearer mine"),
    (b"x-api-key", b"mine"),
    (b"api-key", b"mine"),
    (b"cookie", b"session=mine"),
    (b"x-goog-api-key", b"mine"),
    (b"x-region", b"here"),
    (b"accept", b"*/*"),
]


def sent(form: RequestForm) -> list[bytes]:
    request = UpstreamRequest(b"GET", b"/v1/models", CLIENTS, b"")
    return request_bytes(request, b"h", form).split(b"\r\n")[2:-2]


def test_clients_keys_go_on_where_there_is_no_other() -> None:
    assert sent(AS_GIVEN) == [b": ".join(header) for header in CLIENTS]


def test_the_key_of_a_pool_takes_the_place_of_all_that_clients_prove_themselves_by() -> None:
    form = RequestForm((b"api-key", b"secret"), headers={"X-Region": "there", "accept": ""})
    assert sent(form) == [b"x-region: there", b"api-key: secret"]
    assert form.headers(CLIENTS) == [(b"x-region", b"there"), (b"api-key", b"secret")]
    assert sent(RequestForm(without=CREDENTIALS)) == [b"x-region: here", b"accept: */*"]


@pytest.mark.parametrize(
    ("prefix", "target", "expected"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/v1", "/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1", "/v1/chat/completions?a=b", "/openai/v1/chat/completions?a=b"),
        ("/v1beta/openai", "/v1/models", "/v1beta/openai/models"),
        ("/openai/deployments/gpt", "/v1/chat/completions", "/openai/deployments/gpt/chat/completions"),
        ("/anthropic", "/v1/messages", "/anthropic/v1/messages"),
        ("/vault", "/v1/messages", "/vault/v1/messages"),
        ("/v1", "/rerank", "/v1/rerank"),
        ("/v1", "/llm/v1/models", "/v1/models"),
        ("", "/llm/v1/models", "/v1/models"),
        ("", "/llm2/v1/models", "/llm2/v1/models"),
        ("/v1", "/v1", "/v1/v1"),
    ],
)
def test_targets_below_a_prefix(prefix: str, target: str, expected: str) -> None:
    form = RequestForm(prefix=prefix, root_path="/llm")
    assert form.rewrites
    assert form.target(target.encode()) == expected.encode()


def test_nothing_is_rewritten_unasked() -> None:
    assert not AS_GIVEN.rewrites
    assert not RequestForm((b"api-key", b"k"), headers={"a": "b"}).rewrites


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/v1/models", "/v1/models?api-version=2024-10-21&a+b=%26"),
        (
            "/v1/models?x=1&api-version=2&api%2Dversion=3&key=k",
            "/v1/models?x=1&api-version=2024-10-21&a+b=%26",
        ),
    ],
)
def test_parameters_of_a_pool_replace_those_of_clients(target: str, expected: str) -> None:
    form = RequestForm(query={"api-version": "2024-10-21", "a b": "&", "key": ""})
    assert form.target(target.encode()) == expected.encode()
