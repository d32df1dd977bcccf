"""Logprobs of prompts, echoed prompts and the best of several choices, over HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.server import Server, data_of

pytest.importorskip("torch")

PROMPT = "The with statement is used to wrap"
LONG = "The with statement is used to wrap the execution of a block. " * 12


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--max-num-batched-tokens",
        "64",
        "--max-logprobs",
        "-1",
    )
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


def test_a_prompts_logprobs_for_the_whole_vocabulary(demo: Server) -> None:
    few = {"prompt_logprobs": 2, "max_tokens": 1}
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(demo.complete, LONG, **few)
        [choice] = demo.complete(PROMPT, prompt_logprobs=-1, max_tokens=1)["choices"]
        assert all(2 <= len(each) <= 3 for each in beside.result()["choices"][0]["prompt_logprobs"][1:])
    first, *scored = choice["prompt_logprobs"]
    [narrow] = demo.complete(PROMPT, **few)["choices"]
    assert first is None
    for every, best in zip(scored, narrow["prompt_logprobs"][1:], strict=True):
        assert sum(math.exp(each["logprob"]) for each in every.values()) == pytest.approx(1, abs=1e-3)
        assert next(iter(every)) == next(iter(best))
        for token, each in best.items():
            assert every[token]["rank"] == each["rank"]
            assert every[token]["logprob"] == pytest.approx(each["logprob"], abs=1e-3)


def test_tokens_spelled_as_ids(demo: Server) -> None:
    options = {"logprobs": 1, "temperature": 0, "return_token_ids": True, "echo": True}
    plain = choices(demo, PROMPT, **options)[0]
    spelled = choices(demo, PROMPT, return_tokens_as_token_ids=True, **options)[0]
    ids = [int(token.removeprefix("token_id:")) for token in spelled["logprobs"]["tokens"]]
    assert ids == plain["prompt_token_ids"] + plain["token_ids"]
    assert all(key.startswith("token_id:") for top in spelled["logprobs"]["top_logprobs"][1:] for key in top)
    assert spelled["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
    body |= {
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    [choice] = demo.post("/v1/chat/completions", body).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]


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


def test_the_whole_vocabulary_beside_requests_for_less(demo: Server) -> None:
    """The others get what they asked for."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
    }
    few = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    alone = demo.post("/v1/completions", few).json()["choices"][0]
    with ThreadPoolExecutor(3) as pool:
        narrow = pool.submit(demo.post, "/v1/completions", few)
        all_of_them = pool.submit(demo.post, "/v1/chat/completions", body | {"top_logprobs": -1})
        streamed = pool.submit(
            demo.post, "/v1/chat/completions", body | {"top_logprobs": -1, "stream": True, "min_tokens": 5}
        )
        entries = all_of_them.result().json()["choices"][0]["logprobs"]["content"]
        beside = narrow.result().json()["choices"][0]
        events = [json.loads(event) for event in data_of(streamed.result().text)[:-1]]
    assert (beside["text"], beside["logprobs"]["tokens"]) == (alone["text"], alone["logprobs"]["tokens"])
    for ours, theirs in zip(
        alone["logprobs"]["top_logprobs"], beside["logprobs"]["top_logprobs"], strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert entries
    for entry in entries:
        assert len(entry["top_logprobs"]) > 1000
        assert sum(math.exp(each["logprob"]) for each in entry["top_logprobs"]) == pytest.approx(1, abs=1e-3)
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    sent = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert len(sent) == 5
    assert {len(entry["top_logprobs"]) for entry in sent} == {len(entries[0]["top_logprobs"])}
