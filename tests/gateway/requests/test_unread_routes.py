"""Routes on which neither tokens nor models are read, and the keys that they are refused."""

from __future__ import annotations

import pytest

from penstock.gateway.requests.sender import Budget, Sender
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
        ("/v1/responses/compact", True),
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
    ("sender", "what"),
    [
        (Sender("a", "a", models=("m",)), "models"),
        (Sender("a", "a", budgets=(Budget("output-tokens-per-day", 1, 1.0),)), "output-tokens-per-day"),
        (Sender("a", "a", budgets=(Budget("requests-per-day", 1, 1.0),)), None),
        (Sender("a", "a", most_concurrent=1), None),
        (Sender("a", "a"), None),
    ],
)
def test_keys_with_limits_that_could_not_be_held(sender: Sender, what: str | None) -> None:
    check_unread(sender, "POST", "/v1/chat/completions")
    check_unread(sender, "GET", "/generate")
    if what is None:
        check_unread(sender, "POST", "/generate")
        return
    with pytest.raises(
        ApiError, match=f"The key 'a' has {what}, which .* POST /generate.* /v1/chat/completions"
    ) as no:
        check_unread(sender, "POST", "/generate")
    assert (no.value.status, no.value.code) == (403, "route_not_allowed")


@pytest.mark.parametrize(
    "limit", [{"most_concurrent": 1}, {"budgets": (Budget("requests-per-day", 1, 1.0),)}]
)
def test_a_batch_is_no_single_request(limit: dict[str, object]) -> None:
    sender = Sender("a", "a", **limit)  # type: ignore[arg-type]
    for route in ("/v1/batches", "/v1/messages/batches", "/v1/chat/completions/batch"):
        with pytest.raises(ApiError):
            check_unread(sender, "POST", route)
