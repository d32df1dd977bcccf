"""Limits of reasoning over HTTP: synthetic engines whose prompts open it, killed in the middle of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.generation.planning import TINY_LLAMA
from tests.integration.clients import Streams, until_interrupted
from tests.integration.server import Server, wait_until

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("thinker")
    shutil.copytree(TINY_LLAMA, directory, dirs_exist_ok=True)
    raw = Tokenizer.from_file(str(directory / "tokenizer.json"))
    raw.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    raw.save(str(directory / "tokenizer.json"))
    (directory / "template.jinja").write_text(TEMPLATE)
    own = ["--engine", "synthetic", "--tokenizer", str(directory), "--served-model-name", "m"]
    own += ["--chat-template", str(directory / "template.jinja"), "--reasoning-parser", "think"]
    return [*own, "--reasoning-effort-map", '{"low": 3}']


@pytest.fixture(scope="module")
def server(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    more = ("--data-parallel-size", "2", "--synthetic-step-ms", "5", "--synthetic-tokens-per-step", "3")
    with Server(*options, *more, directory=tmp_path_factory.mktemp("serve")) as running:
        wait_until(lambda: running.metric("penstock:engine_up") == 2, 60, "connecting to both engines")
        yield running


def asked(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions", CHAT | fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_usage_counts_exactly_the_budget(server: Server, budget: int) -> None:
    free = asked(server, max_tokens=30)
    body = asked(server, max_tokens=30, thinking_token_budget=budget, return_token_ids=True)
    choice, wanted = body["choices"][0], free["choices"][0]["message"]["reasoning"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30
    assert wanted.startswith(choice["message"]["reasoning"] or "")
    assert choice["message"]["content"]
    assert body["usage"]["completion_tokens"] == 30


def test_an_effort_and_budget_tokens_do_the_same(server: Server) -> None:
    body = asked(server, max_tokens=30, reasoning_effort="low")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    thinking = {"type": "enabled", "budget_tokens": 5}
    reply = server.post("/v1/messages", CHAT | {"max_tokens": 30, "thinking": thinking})
    assert [block["type"] for block in reply.json()["content"]] == ["thinking", "text"]
    refused = server.post("/v1/chat/completions", CHAT | {"thinking_token_budget": -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_the_count_survives_a_killed_engine(server: Server, options: list[str]) -> None:
    sampling: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
    bodies = [
        {"prompt": "x<think>", "seed": seed, "thinking_token_budget": 23 * seed, "stream_interval": 1 + seed}
        | sampling
        for seed in range(8)
    ]
    with Streams(server.url, bodies) as streams:
        streams.until_all_ended()
        undisturbed = [client.token_ids for client in streams._clients]

    def kill_one() -> None:
        (victim, _) = server.children("engine")
        with Streams(server.url, bodies) as streams:
            streams.until_each_has(3)
            server.kill(victim)
            streams.until_all_ended()
            assert streams.failures == []
            assert [client.token_ids for client in streams._clients] == undisturbed

    until_interrupted(server, kill_one)
    end = Tokenizer.from_file(f"{options[3]}/tokenizer.json").token_to_id("</think>")
    assert [ids.index(end) for ids in undisturbed] == [23 * seed for seed in range(8)]
