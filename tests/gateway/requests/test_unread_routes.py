"""Routes on which neither tokens nor models are read, and the keys that they are refused."""

from __future__ import annotations

import pytest

from penstock.gateway.requests.caller import Budget, Caller
from penstock.gateway.requests.unread_routes import check_unread, is_unread
from penstock.http.errors import ApiError


@pytest.mark.parametrize(
    ("route", "unread"),
    [
        ("/generate", True),
        ("/completion", True),
        ("/v1/batches", True),
        ("/v1/chat/completions/batch", True),
        ("/v1/chat/completions/anything", True),
        ("/v1/messages/batches", True),
        ("/v1/responses/compact", False),
        ("/v1/chat/completions", False),
        ("/v1/messages/count_tokens", False),
        ("/v1/responses/resp_1/cancel", False),
        ("/v1/chat/completions/render", False),
        ("/v1/embeddings", False),
        ("/v1/files", False),
        ("/rerank", False),
        ("/tokenize", False),
    ],
)
def test_unread_routes(route: str, unread: bool) -> None:
    assert is_unread("POST", route) is unread
    assert not is_unread("GET", route)
    assert not is_unread("DELETE", route)


@pytest.mark.parametrize(
    ("caller", "what"),
    [
        (Caller("a", "a", models=("m",)), "models"),
        (Caller("a", "a", budgets=(Budget("output-tokens-per-day", 1, 1.0),)), "output-tokens-per-day"),
        (Caller("a", "a", budgets=(Budget("requests-per-day", 1, 1.0),)), None),
        (Caller("a", "a", most_concurrent=1), None),
        (Caller("a", "a"), None),
    ],
)
def test_keys_with_limits_that_could_not_be_held(caller: Caller, what: str | None) -> None:
    check_unread(caller, "POST", "/v1/chat/completions")
    check_unread(caller, "GET", "/generate")
    if what is None:
        check_unread(caller, "POST", "/generate")
        return
    with pytest.raises(
        ApiError, match=f"The key 'a' has {what}, which .* POST /generate.* /v1/chat/completions"
    ) as no:
        check_unread(caller, "POST", "/generate")
    assert (no.value.status, no.value.code) == (403, "route_not_allowed")


@pytest.mark.parametrize(
    "limit", [{"most_concurrent": 1}, {"budgets": (Budget("requests-per-day", 1, 1.0),)}]
)
def test_a_batch_is_no_single_request(limit: dict[str, object]) -> None:
    caller = Caller("a", "a", **limit)  # type: ignore[arg-type]
    for route in ("/v1/batches", "/v1/messages/batches", "/v1/chat/completions/batch"):
        with pytest.raises(ApiError):
            check_unread(caller, "POST", route)
