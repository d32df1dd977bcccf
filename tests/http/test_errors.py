from __future__ import annotations

import json

import pytest

from penstock.http.errors import ApiError, refused, unknown_model, unknown_route


def test_body_has_the_four_fields_clients_read() -> None:
    error = ApiError(400, 'no "such" thing \u2028', param="n")
    assert json.loads(error.body()) == {
        "error": {"message": 'no "such" thing \u2028', "type": "BadRequestError", "param": "n", "code": 400}
    }


def test_type_and_code_can_be_named() -> None:
    error = ApiError(503, "later", type="Busy", code="queue_full")
    assert (error.type, error.code, error.param) == ("Busy", "queue_full", None)


@pytest.mark.parametrize(
    ("status", "type"),
    [
        (401, "AuthenticationError"),
        (426, "UpgradeRequiredError"),
        (429, "RateLimitError"),
        (599, "InternalServerError"),
    ],
)
def test_type_follows_the_status(status: int, type: str) -> None:
    assert ApiError(status, "").type == type


def test_refused_names_parameter_and_value() -> None:
    assert refused("too big", "n", 3).message == "too big (parameter=n, value=3)"
    assert refused("too big", "n").message == "too big (parameter=n)"
    assert refused("too big", "n").param == "n"


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"])
def test_an_unknown_route_names_the_one_that_was_meant(path: str) -> None:
    error = unknown_route(path, ("/health", "/v1/chat/completions"), lambda _: False)
    assert error.status == 404
    assert error.message == f"No route {path}. Did you mean /v1/chat/completions?"


def test_an_unknown_route_lists_what_there_is() -> None:
    routes = ("/v1/models", "/health", "/sleep")
    error = unknown_route("/v1", routes, lambda route: route != "/sleep")
    assert error.message == "No route /v1. There are /health, /v1/models."


def test_unknown_model_lists_what_is_served() -> None:
    error = unknown_model("x", ("a", "b"))
    assert (error.status, error.param) == (404, "model")
    assert error.message == "The model `x` does not exist. Valid aliases: a, b."
    many = unknown_model("x", map(str, range(300))).message
    assert many.endswith(", 18, 19 … (300 in all).")
