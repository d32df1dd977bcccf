from __future__ import annotations

import json

import pytest

from penstock.http.errors import ApiError, refused, unknown_model, wrong_method


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


def test_a_wrong_method_names_those_that_a_route_takes() -> None:
    error = wrong_method("/ping", "PUT", ("POST", "GET"))
    assert (error.status, error.message) == (405, "/ping takes GET or POST, not PUT.")
    assert error.headers == [(b"allow", b"GET, POST")]


def test_unknown_model_lists_what_is_served() -> None:
    error = unknown_model("x", ("a", "b"))
    assert (error.status, error.param) == (404, "model")
    assert error.message == "The model `x` does not exist. Valid aliases: a, b."
    many = unknown_model("x", map(str, range(300))).message
    assert many.endswith(", 18, 19 … (300 in all).")
