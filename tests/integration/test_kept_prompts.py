"""Turns of conversations of which engines get only the new tokens, also across an engine that is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import Streams
from tests.integration.server import SYNTHETIC, Server, wait_until

TURNS = 4
OPTIONS = (*SYNTHETIC, "--synthetic-step-ms", "5", "--max-model-len", "16384")
REPLY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
"""The reply is a function of all tokens of the prompt."""


def conversations() -> list[list[list[int]]]:
    """The prompts of each conversation's turns. They begin alike."""
    randoms = random.Random(1)
    system = [randoms.randrange(20, 200) for _ in range(4500)]
    made = []
    for number in range(3):
        history = system[: 4500 - 2 * number]
        made.append([])
        for _ in range(TURNS):
            history = history + [randoms.randrange(20, 200) for _ in range(50)]
            made[-1].append(history)
            history = history[: len(history) - number]
    return made


def texts_of(server: Server, bodies: list[dict[str, Any]]) -> list[str]:
    with Streams(server.url, bodies) as streams:
        streams.until_all_ended()
        assert streams.failures == []
        return streams.texts


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*OPTIONS, directory=tmp_path_factory.mktemp("kept")) as server:
        yield server


def test_replies_are_those_to_whole_prompts(kept: Server, tmp_path: Path) -> None:
    with Server(*OPTIONS, "--kept-prompt-bytes", "0", directory=tmp_path) as whole:
        for turn in range(TURNS):
            for conversation in conversations():
                texts = [
                    server.complete(conversation[turn], **REPLY)["choices"][0]["text"]
                    for server in (kept, whole)
                ]
                assert texts[0] == texts[1]
        assert whole.metric("penstock:kept_prompt_hits_total") == 0
        assert whole.metric("penstock:kept_prompt_bytes") == 0
    assert kept.metric("penstock:kept_prompt_hits_total") >= 3 * (TURNS - 1)
    assert kept.metric("penstock:kept_prompt_misses_total") == 0
    assert kept.metric("penstock:kept_prompt_bytes") > 4 * 4500


def test_chats_go_on_from_what_the_turn_before_has_made(kept: Server) -> None:
    """An engine gets of each turn what the API server has tokenized of it."""
    messages = [{"role": "user", "content": "Read these lines.\n" * 2500}]
    before = kept.metric("penstock:kept_prompt_hits_total")
    texts = []
    for _ in range(2):
        conversation = list(messages)
        for turn in range(TURNS):
            body = REPLY | {"model": "m", "messages": conversation}
            reply = kept.post("/v1/chat/completions", body).json()["choices"][0]["message"]
            texts.append(reply["content"])
            conversation += [reply, {"role": "user", "content": f"And {turn}?"}]
    assert texts[:TURNS] == texts[TURNS:]
    assert len(set(texts)) == TURNS
    assert kept.metric("penstock:kept_prompt_hits_total") >= before + 2 * TURNS - 1
    assert kept.metric("penstock:kept_prompt_misses_total") == 0


def test_streams_go_on_and_turns_are_whole_once_after_a_kill(kept: Server) -> None:
    turns = [conversation[-1] for conversation in conversations()]
    bodies = [REPLY | {"prompt": prompt, "max_tokens": 150} for prompt in turns]
    undisturbed = texts_of(kept, bodies)
    with Streams(kept.url, bodies) as streams:
        streams.until_each_has(3)
        (engine,) = kept.children("engine")
        engine.kill()
        streams.until_all_ended()
    assert (streams.failures, streams.texts) == ([], undisturbed)
    wait_until(lambda: kept.metric("penstock:engine_up") == 1, 90, "the engine being up again")
    before = kept.metric("penstock:kept_prompt_hits_total")
    for _ in range(2):
        assert texts_of(kept, bodies) == undisturbed
    assert kept.metric("penstock:kept_prompt_hits_total") >= before + len(turns)
    assert kept.metric("penstock:kept_prompt_misses_total") == 0
