"""What a client learns that asks for a route that is not served."""

from __future__ import annotations

import re

import pytest

from penstock.api.routes.openapi import openapi_document
from penstock.http.access_keys import is_administrative
from penstock.http.errors import MAX_MESSAGE
from penstock.http.other_routes import OTHER_ROUTES, unknown_route

ROUTES = tuple(openapi_document("1", page=False)["paths"])


def told(path: str, client: str = "") -> str:
    """What the message says after the path."""
    error = unknown_route(path, ROUTES, lambda route: not is_administrative(route), client)
    assert (error.status, error.code) == (404, 404)
    assert error.message.startswith(f"No route {path}. ")
    assert len(error.message) < MAX_MESSAGE * 0.7
    return error.message.removeprefix(f"No route {path}. ")


def test_who_asks_for_teis_description_is_told() -> None:
    assert (
        unknown_route("/info", ("/health",), lambda route: True).message
        == "No route /info. Here it is GET /v1/models."
    )


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


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/models", "/v1/models"),
        ("/models", "/v1/models or /v1beta/models"),
        ("/v1beta/openai/chat/completions", "/v1/chat/completions"),
        ("/v1/engines/davinci/completions", "/v1/completions"),
        ("/openai/deployments/x/chat/completions", "/v1/chat/completions"),
        ("/api/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/generate", "/generate"),
        ("/messages", "/v1/messages"),
        ("/v1/messages/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/tags", "/api/tags"),
        ("/embeddings", "/v1/embeddings or /api/embeddings"),
        ("/v1/classify", "/classify"),
        ("/models/m:embedContent", "/v1beta/models/{model}:embedContent"),
        ("/models/m:generateContent", "/v1beta/models/{model}:generateContent"),
        ("/v1/metrics", "/metrics"),
        ("/metric", "/metrics"),
        ("/v1/sleep", "/sleep"),
    ],
)
def test_the_route_that_was_meant_is_named(path: str, meant: str) -> None:
    assert told(path).startswith(f"Did you mean {meant}? This server has the APIs of ")


@pytest.mark.parametrize(
    ("path", "client", "api", "first"),
    [
        ("/v1/edits", "", "OpenAI", "/v1/completions, /v1/responses, /v1/embeddings,"),
        ("/v1/audio/transcriptions", "", "OpenAI", "/v1/completions,"),
        ("/v1/moderations", "", "OpenAI", "/v1/completions,"),
        ("/v1/conversations", "", "OpenAI", "/v1/completions,"),
        ("/v1/threads/t/messages", "", "OpenAI", "/v1/completions,"),
        ("/v1", "", "OpenAI", "/v1/completions,"),
        ("/anything", "", "OpenAI", "/v1/completions,"),
        ("/v1/responses/resp_1/x/y", "", "OpenAI", "/v1/responses,"),
        ("/v1/messages/batches", "", "Anthropic", "/v1/messages, /v1/messages/count_tokens;"),
        ("/v1/files", "/v1/messages", "Anthropic", "/v1/messages, /v1/messages/count_tokens;"),
        ("/v1/complete", "/v1/messages", "Anthropic", "/v1/messages, /v1/messages/count_tokens;"),
        ("/api/copy", "", "Ollama", "/api/"),
        ("/api/pull", "", "Ollama", "/api/"),
        ("/v1beta/models/m:embedText", "", "Gemini", "/v1beta/models,"),
        ("/v1/models/m:embedText", "/v1beta/models/{model}:generateContent", "Gemini", "/v1beta/models,"),
    ],
)
def test_others_learn_what_is_served_of_their_api(path: str, client: str, api: str, first: str) -> None:
    start = f"This server has the APIs of Anthropic, Cohere, Gemini, Ollama, OpenAI, TEI; of {api}'s it has "
    told_there = told(path, client)
    assert told_there.startswith(start + first)
    assert told_there.endswith("; GET /openapi.json lists all routes.")
    assert not any(is_administrative(route) for route in re.findall(r"/[^\s,;]+", told_there))


def test_long_paths_cost_no_more() -> None:
    error = unknown_route("/v1/x" * 10_000, ROUTES, lambda route: True)
    assert len(error.message) < MAX_MESSAGE
