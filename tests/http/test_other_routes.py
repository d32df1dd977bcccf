"""What other servers call the routes with which they are controlled."""

from __future__ import annotations

import re

import pytest

from penstock.api.routes.openapi import openapi_document
from penstock.http.errors import unknown_route
from penstock.http.other_routes import OTHER_ROUTES


@pytest.mark.parametrize("path", OTHER_ROUTES)
def test_each_names_a_route_that_there_is(path: str) -> None:
    routes = openapi_document("1")["paths"]
    assert path not in routes
    named = re.findall(r"\b(GET|POST) (/[a-z0-9_/]+)", OTHER_ROUTES[path])
    assert named
    assert all(method.lower() in routes[route] for method, route in named)


def test_who_asks_for_one_is_told() -> None:
    error = unknown_route("/continue_generation/", ("/resume", "/health"), lambda route: True)
    assert (error.status, error.message) == (
        404,
        "No route /continue_generation/. Here it is POST /resume.",
    )
