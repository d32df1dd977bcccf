"""Requests of the wanted length, against a server made of functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.bench.errors import BenchError
from penstock.bench.request_bodies import PROMPTS, BenchmarkBodies
from penstock.config.bench import BenchHostConfig


def tokens_of(text: str) -> list[int]:
    """A tokenizer of sorts: a token per three letters, and one for the beginning."""
    return [1, *(2 + sum(map(ord, text[start : start + 3])) for start in range(0, len(text), 3))]


def handle(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    body = json.loads(request.content)
    assert body["model"] == "m"
    if request.url.path == "/tokenize":
        return httpx.Response(200, json={"tokens": tokens_of(body["prompt"])})
    usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
    return httpx.Response(200, json={"usage": usage})


def requests(handler: Callable[[httpx.Request], httpx.Response] = handle, **options: Any) -> BenchmarkBodies:
    http = httpx.Client(base_url="http://x", transport=httpx.MockTransport(handler))
    return BenchmarkBodies(BenchHostConfig(**options), http)


@pytest.mark.parametrize("wanted", [1, 2, 32, 2000, 20_000])
def test_texts_have_about_the_wanted_number_of_tokens(wanted: int) -> None:
    bodies = [json.loads(body) for body in requests(prompt_tokens=wanted, tokens=9).bodies()]
    assert len({body["prompt"] for body in bodies}) > PROMPTS / 2
    for body in bodies:
        assert len(tokens_of(body["prompt"])) == pytest.approx(wanted, rel=0.05, abs=12)
    shown = {name: value for name, value in bodies[0].items() if name != "prompt"}
    assert shown == {"model": "m", "max_tokens": 9, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("wanted", [1, 32, 3000])
def test_ids_have_exactly_the_wanted_number(wanted: int) -> None:
    bodies = [json.loads(body) for body in requests(prompt_tokens=wanted, prompt_kind="ids").bodies()]
    assert len(bodies) == PROMPTS
    assert {len(body["prompt"]) for body in bodies} == {wanted}
    if wanted > 1:
        assert len({tuple(body["prompt"]) for body in bodies}) == PROMPTS


def test_chat_sends_the_text_as_a_message() -> None:
    chat = requests(endpoint="chat")
    assert chat.path == "/v1/chat/completions"
    message = json.loads(chat.bodies()[0])["messages"]
    assert message[0]["role"] == "user"
    assert len(tokens_of(message[0]["content"])) == pytest.approx(32, abs=12)


def test_the_probe_tells_what_the_server_counts() -> None:
    facts = requests(tokens=5).probe()
    assert (facts.model, facts.prompt_tokens, facts.completion_tokens) == ("m", 7, 5)


def test_a_server_that_stops_early_cannot_be_measured() -> None:
    def stingy(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            return httpx.Response(200, json={"usage": {"prompt_tokens": 7, "completion_tokens": 3}})
        return handle(request)

    with pytest.raises(BenchError, match="sent 3 of the 5 tokens"):
        requests(stingy, tokens=5).probe()


def test_a_refusal_is_quoted() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return (
            handle(request) if request.url.path == "/v1/models" else httpx.Response(404, text="nothing here")
        )

    with pytest.raises(BenchError, match="POST /tokenize was answered with 404: nothing here"):
        requests(refuse).bodies()


def test_a_server_that_is_not_there_is_told() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(BenchError, match="GET /v1/models failed: ConnectError"):
        requests(broken)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"logprobs": 2}),
        ("chat", {"logprobs": True, "top_logprobs": 2}),
        ("responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
def test_logprobs_are_asked_for_as_each_api_has_it(endpoint: Any, fields: dict[str, Any]) -> None:
    body = json.loads(requests(endpoint=endpoint, logprobs=2).bodies()[0])
    assert {name: body[name] for name in fields} == fields
    plain = json.loads(requests(endpoint=endpoint).bodies()[0])
    assert not plain.keys() & fields.keys()


def test_messages_have_no_logprobs() -> None:
    with pytest.raises(ValueError, match="--logprobs 0: the messages API has none"):
        BenchHostConfig(endpoint="messages", logprobs=0)
