"""Logprobs of prompts, echoed prompts and the best of several choices, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.server import Server

pytest.importorskip("torch")

PROMPT = "The with statement is used to wrap"
LONG = "The with statement is used to wrap the execution of a block. " * 12


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "64")
    with Server(*options, directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


def choices(server: Server, prompt: str, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.complete(prompt, max_tokens=6, **options)["choices"]
    return found


def test_a_prompt_scored_in_chunks_is_scored_as_the_output_that_it_was(demo: Server) -> None:
    output = choices(demo, LONG, temperature=0, logprobs=1, ignore_eos=True)[0]
    whole = demo.complete(LONG + output["text"], max_tokens=0, echo=True, logprobs=1)["choices"][0]
    own, echoed = output["logprobs"], whole["logprobs"]
    assert echoed["tokens"][-6:] == own["tokens"]
    assert echoed["token_logprobs"][-6:] == pytest.approx(own["token_logprobs"], abs=1e-4)
    assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    assert len(whole["prompt_logprobs"]) == len(echoed["tokens"]) > 100
    assert whole["text"] == LONG + output["text"]
    assert echoed["tokens"][0] == "<|begin|>"  # which the text does not have
    for token, offset in list(zip(echoed["tokens"], echoed["text_offset"], strict=True))[1:]:
        assert whole["text"].startswith(token, offset)


def test_a_streamed_echo_has_the_whole_replys_logprobs(demo: Server) -> None:
    options = {"echo": True, "logprobs": 2, "n": 2, "seed": 7, "temperature": 1.0}
    whole = choices(demo, PROMPT, **options)
    events = demo.stream(PROMPT, max_tokens=6, **options)
    for index, expected in enumerate(whole):
        parts = [json.loads(event)["choices"][0] for event in events[:-1]]
        parts = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for field, values in expected["logprobs"].items():
            streamed = [value for part in parts for value in (part["logprobs"] or {field: []})[field]]
            assert json.dumps(streamed) == json.dumps(values)


def test_chats_report_their_prompt_once(demo: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 1}
    reply = demo.post("/v1/chat/completions", body).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert reply["prompt_logprobs"][0] is None
    assert all(1 <= len(entry) <= 2 for entry in reply["prompt_logprobs"][1:])


def test_the_best_of_several_choices_are_the_likeliest(demo: Server) -> None:
    options = {"seed": 3, "temperature": 1.5, "logprobs": 0}
    every = choices(demo, PROMPT, n=6, **options)
    likelihood = [sum(choice["logprobs"]["token_logprobs"]) for choice in every]
    best = sorted(range(6), key=lambda index: -likelihood[index])[:2]
    reply = demo.complete(PROMPT, max_tokens=6, n=2, best_of=6, **options)
    assert [choice["text"] for choice in reply["choices"]] == [every[index]["text"] for index in best]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] > 12
    assert choices(demo, PROMPT, n=1, best_of=6, seed=3, temperature=1.5)[0]["logprobs"] is None
