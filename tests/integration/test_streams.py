"""A stream says what the whole reply says, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.integration.server import Server


def joined(events: list[str]) -> tuple[str, list[int], dict[str, Any]]:
    """Text, token ids and last choice of a one-choice stream."""
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    text = "".join(choice["text"] for choice in choices)
    return text, [token for choice in choices for token in choice.get("token_ids") or []], choices[-1]


@pytest.mark.parametrize("seed", range(4))
def test_ids_and_text_equal_the_whole_reply(server: Server, seed: int) -> None:
    options = {"max_tokens": 60, "seed": seed, "return_token_ids": True}
    whole = server.complete(**options)["choices"][0]
    text, ids, last = joined(server.stream(**options))
    assert (text, ids) == (whole["text"], whole["token_ids"])
    assert last["finish_reason"] == whole["finish_reason"] == "length"
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("interval", [1, 2, 7, 50, 100])
def test_an_interval_changes_the_events_and_nothing_else(server: Server, interval: int) -> None:
    plain, _, _ = joined(server.stream(max_tokens=50, seed=9))
    events = server.stream(max_tokens=50, seed=9, stream_interval=interval)
    text, _, _ = joined(events)
    assert text == plain
    assert len(events) - 1 <= 1 + -(-49 // interval)


def test_events_may_be_paced_by_time(server: Server) -> None:
    plain, _, _ = joined(server.stream(max_tokens=50, seed=9))
    events = server.stream(max_tokens=50, seed=9, stream_interval_ms=60_000)
    assert len(events) <= 3  # the first token, the others with the end, [DONE]; a busy server merges
    assert joined(events)[0] == plain


def test_tokens_per_event_are_a_metric(server: Server) -> None:
    def observed() -> tuple[float, float]:
        return tuple(server.metric(f"penstock:stream_event_tokens_{part}") for part in ("count", "sum"))

    events, tokens = observed()
    server.stream(max_tokens=41, seed=9, stream_interval=40)
    server.complete(max_tokens=41, seed=9)
    told, delivered = observed()
    assert told - events <= 2  # a busy server merges
    assert delivered == tokens + 41


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(server: Server, interval: int, include: bool) -> None:
    plain, ids, _ = joined(server.stream(max_tokens=50, seed=2, return_token_ids=True))
    stop = plain[30:36]
    options = {
        "max_tokens": 50,
        "seed": 2,
        "stop": [stop, "never there"],
        "include_stop_str_in_output": include,
    }
    reply = server.complete(**options)
    whole = reply["choices"][0]
    expected = plain[: plain.index(stop) + (len(stop) if include else 0)]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", stop)
    assert 0 < reply["usage"]["completion_tokens"] < len(ids)
    text, _, last = joined(server.stream(stream_interval=interval, **options))
    assert (text, last["finish_reason"], last["stop_reason"]) == (expected, "stop", stop)


def test_logprobs_stay_in_step_with_tokens(server: Server) -> None:
    options = {"max_tokens": 12, "seed": 4, "logprobs": 2}
    whole = server.complete(**options)["choices"][0]
    assert len(whole["logprobs"]["tokens"]) == 12
    assert all(len(top) >= 2 for top in whole["logprobs"]["top_logprobs"])
    gathered: dict[str, list[Any]] = {}
    for event in server.stream(**options)[:-1]:
        for key, values in json.loads(event)["choices"][0]["logprobs"].items():
            gathered.setdefault(key, []).extend(values)
    assert gathered == whole["logprobs"]


def test_echo_and_token_prompts(server: Server) -> None:
    reply = server.complete("some text", echo=True, max_tokens=3, seed=1)
    assert reply["choices"][0]["text"].startswith("some text")
    ids = server.post("/tokenize", {"prompt": "some text"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).status_code == 200
    by_ids = server.complete(ids, max_tokens=3, seed=1)
    assert by_ids["choices"][0]["text"] == reply["choices"][0]["text"].removeprefix("some text")
    assert by_ids["usage"]["prompt_tokens"] == len(ids)


def test_continuous_usage_counts_up(server: Server) -> None:
    events = server.stream(
        max_tokens=5, seed=1, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]
    assert all(1 <= count <= 5 for count in counts)


def test_the_request_id_is_the_clients(server: Server) -> None:
    reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "mine"})
    assert reply.json()["id"] == "cmpl-mine"
