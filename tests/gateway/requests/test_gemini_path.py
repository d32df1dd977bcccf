"""Gemini's requests: model, stream and key are in the path and the query."""

from __future__ import annotations

import pytest

from penstock.gateway.requests.gemini_path import COUNT, GENERATE, STREAM, model_in, verb_route, with_model
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.request_body import read_request
from penstock.http.access_keys import presented_key, with_query_key, without_query_key

BODY = b'{"contents":[{"parts":[{"text":"Hi"}]}],"generationConfig":{"maxOutputTokens":7}}'


@pytest.mark.parametrize(
    ("target", "route", "model"),
    [
        (b"/v1beta/models/m:generateContent", GENERATE, "m"),
        (b"/v1/models/org%2Fm:8b:streamGenerateContent?alt=sse", STREAM, "org/m:8b"),
        (b"/llm/v1beta/models/m%3AcountTokens", COUNT, "m"),
    ],
)
def test_the_path_names_the_model(target: bytes, route: str, model: str) -> None:
    assert model_in(target) == model
    assert model_in(with_model(target, "an other")) == "an other"
    read = read_request(BODY, route, target)
    assert (read.model, read.stream, read.most_output) == (
        model if route != COUNT else "",
        route == STREAM,
        7,
    )
    incoming = IncomingRequest("POST", target, route, [], BODY, read, model)
    assert incoming.for_model("b").raw == BODY
    assert model_in(incoming.for_model("b").target) == "b"


def test_routes_are_told_by_their_verb() -> None:
    assert verb_route("/v1beta/models/a/b:c:GenerateContent") == GENERATE
    for path in ("/v1beta/models/m", "/v1beta/models/m:tune", "/v1beta/tuned/m:generateContent"):
        assert verb_route(path) is None
    assert not read_request(BODY, STREAM, b"/v1beta/models/m:streamGenerateContent").stream, "a JSON array"


def test_a_key_in_the_query_is_taken_there_alone_and_not_passed_on() -> None:
    target = b"/v1beta/models/m:generateContent?alt=sse&key=a%2Bb&x=1"
    assert presented_key(with_query_key("/v1beta/models:generateContent", target, {})) == b"a+b"
    assert without_query_key("/v1beta/models", target) == b"/v1beta/models/m:generateContent?alt=sse&x=1"
    assert without_query_key("/v1beta/models", b"/v1beta/models?key=a") == b"/v1beta/models"
    assert presented_key(with_query_key("/metrics", b"/metrics?key=a", {})) is None
    assert presented_key({b"x-goog-api-key": b"a"}) == b"a"
