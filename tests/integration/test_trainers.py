"""What trainers' clients send, and the fields that they read: renderers 0.1.12 (prime-rl), SkyRL 0.3, slime,
TRL 1.16.

The requests and the checks of replies are written after these clients' sources. The server is of two API
servers and two engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.processes import gateway as running_gateway
from tests.integration.server import Server, data_of, wait_until

pytest.importorskip("torch")

PROMPT = [1, 20, 300, 4]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--dtype", "float32", "--threads", "1", "--strict-requests")
    processes = ("--api-server-count", "2", "--data-parallel-size", "2")
    with Server(*options, *processes, directory=tmp_path_factory.mktemp("fleet")) as server:
        wait_until(lambda: server.metric("penstock:engine_up") == 2, 60, "connecting to both engines")
        yield server


def posted(server: Server, path: str, body: dict[str, Any], **headers: str) -> Any:
    reply = server.post(path, body, **headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def model_of(server: Server) -> str:
    name: str = server.get("/v1/models").json()["data"][0]["id"]
    return name


def test_prime_rls_renderer(fleet: Server) -> None:
    """It sends ids to the root of the server, and refuses a reply whose logprobs are not those of its ids."""
    [card] = fleet.get("/v1/models").json()["data"]
    assert isinstance(card["max_model_len"], int)
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": MAX_TOKENS,
        "min_tokens": 0,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    body = {"model": card["id"], "token_ids": PROMPT, "sampling_params": sampling, "priority": 1}
    headers = {"X-Session-ID": "rollout-1", "X-data-parallel-rank": "1"}
    data = posted(fleet, "/inference/v1/generate", body | {"cache_salt": "7"}, **headers)
    [choice] = data["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    assert len(content) == len(ids) <= MAX_TOKENS
    for id, entry in zip(ids, content, strict=True):
        assert entry["token"] == f"token_id:{id}"
        assert isinstance(entry["logprob"], float)
        assert math.isfinite(entry["logprob"])
        assert entry["logprob"] != -9999.0
    assert data["request_id"]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["routed_experts"] is choice["sampling_mask"] is None
    assert data["usage"]["prompt_tokens"] == len(PROMPT)
    assert "cached_tokens" in data["usage"]["prompt_tokens_details"]


def test_prime_rls_renderer_continues_a_turn(fleet: Server) -> None:
    """The prompt of the next turn is its own ids and the sampled ones; the prefix cache has them."""
    sampling = {"max_tokens": 64, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
    headers = {"X-Session-ID": "rollout-2"}
    prompt = [*range(100, 300)]
    first = posted(
        fleet, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}, **headers
    )
    turn = [*prompt, *first["choices"][0]["token_ids"], 5, 6]
    body = {"token_ids": turn, "sampling_params": sampling, "return_token_ids": True}
    second = posted(fleet, "/inference/v1/generate", body, **headers)
    assert second["prompt_token_ids"] == turn
    assert second["usage"]["prompt_tokens"] == len(turn)


def test_skyrls_generate(fleet: Server) -> None:
    sampling = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 0,
        "stop": None,
    }
    body = {"sampling_params": sampling, "model": model_of(fleet), "token_ids": PROMPT, "cache_salt": "3"}
    response = posted(fleet, "/inference/v1/generate", body, **{"X-Session-ID": "7"})
    choice = response["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"].get("content", [])]
    assert len(logprobs) == len(choice["token_ids"])
    text = posted(fleet, "/detokenize", {"model": body["model"], "tokens": choice["token_ids"]})["prompt"]
    assert isinstance(text, str)


def test_skyrls_sample(fleet: Server) -> None:
    """Tinker's samples: several outputs, logprobs of the prompt by token id as text."""
    sampling = {
        "n": 3,
        "logprobs": 0,
        "output_kind": 2,
        "prompt_logprobs": 2,
        "temperature": 0.7,
        "max_tokens": MAX_TOKENS,
        "seed": 11,
        "top_k": -1,
        "top_p": 0.9,
        "stop": ["unlikely"],
        "stop_token_ids": [2],
    }
    body = {"sampling_params": sampling, "model": model_of(fleet), "token_ids": PROMPT}
    response = posted(fleet, "/inference/v1/generate", body)
    assert len(response["choices"]) == 3
    for choice in response["choices"]:
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    first, *scored = response["prompt_logprobs"]
    assert first is None
    assert [str(id) in each for id, each in zip(PROMPT[1:], scored, strict=True)] == [True] * 3
    assert all(len(each) in (2, 3) for each in scored)


def test_skyrls_chat_and_render(fleet: Server) -> None:
    messages = [{"role": "user", "content": "Say hello"}]
    body = {"model": model_of(fleet), "messages": messages, "max_tokens": 4, "session_id": "7"}
    rendered = posted(fleet, "/v1/chat/completions/render", body, **{"X-Session-ID": "7"})
    assert rendered["token_ids"]
    assert (rendered.get("features") or {}) == {}
    assert posted(fleet, "/v1/chat/completions", body)["choices"][0]["message"]["role"] == "assistant"


def test_slimes_rollout(fleet: Server) -> None:
    """Its tokens are those of output_token_logprobs; a partial rollout is sent again as a prompt."""
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": MAX_TOKENS,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 1,
    }
    body = {"sampling_params": sampling, "return_logprob": True, "input_ids": PROMPT}
    output = posted(fleet, "/generate", body, **{"X-SMG-Routing-Key": "s"})
    meta = output["meta_info"]
    tokens = [item[1] for item in meta["output_token_logprobs"]]
    assert tokens == output["output_ids"]
    assert all(item[0] <= 0 for item in meta["output_token_logprobs"])
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert isinstance(output["text"], str)
    assert isinstance(meta["weight_version"], str)
    again = posted(fleet, "/generate", body | {"input_ids": [*PROMPT, *tokens]})
    assert again["meta_info"]["prompt_tokens"] == len(PROMPT) + len(tokens)


TRLS_SAMPLING: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": MAX_TOKENS,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


@pytest.mark.parametrize("prompts", [[PROMPT, [5, 6, 7]], ["The list of", "Return"]], ids=["ids", "texts"])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_trls_generate(fleet: Server, prompts: list[Any], logprobs: int | None) -> None:
    """Choices of one prompt after those of another; tokens of logprobs are told by their ids."""
    n = 2
    body = TRLS_SAMPLING | {"model": model_of(fleet), "prompt": prompts, "n": n, "logprobs": logprobs}
    choices = posted(fleet, "/v1/completions", body)["choices"]
    assert len(choices) == n * len(prompts)
    sent = [choice["prompt_token_ids"] for choice in choices[::n]]
    assert sent == prompts or isinstance(prompts[0], str)
    for choice in choices:
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        told = choice["logprobs"]
        columns = (choice["token_ids"], told["tokens"], told["token_logprobs"], told["top_logprobs"])
        for id, token, logprob, top in zip(*columns, strict=True):
            assert token == f"token_id:{id}"
            assert isinstance(logprob, float)
            every = {token: logprob} | (top or {})
            assert logprobs <= len(every) <= logprobs + 1
            assert all(int(other.removeprefix("token_id:")) >= 0 for other in every)


def test_trls_chat(fleet: Server) -> None:
    messages = [{"role": "user", "content": "Say hello"}]
    fields = {"model": model_of(fleet), "messages": messages, "logprobs": True, "top_logprobs": 2}
    reply = posted(fleet, "/v1/chat/completions", TRLS_SAMPLING | fields | {"n": 2})
    assert reply["prompt_token_ids"]
    for choice in reply["choices"]:
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in choice["token_ids"]]
        assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])


def test_trls_logprobs_of_sequences(fleet: Server) -> None:
    """Those of a teacher, by rank; the sequence's own token is always among them."""
    sequences = [[*PROMPT, 7, 8], [5, 6, 7]]
    body = {"prompt": sequences, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 5}
    choices = posted(fleet, "/v1/completions", body | {"model": model_of(fleet)})["choices"]
    for sequence, choice in zip(sequences, choices, strict=True):
        assert len(choice["prompt_logprobs"]) == len(sequence)
        for token, each in zip(sequence[1:], choice["prompt_logprobs"][1:], strict=True):
            ranked = sorted(each.values(), key=lambda item: item["rank"])
            assert [item["rank"] for item in ranked[:5]] == [1, 2, 3, 4, 5]
            assert isinstance(each[str(token)]["logprob"], float)


def test_a_field_that_no_server_knows_is_told_of(fleet: Server) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokns": 1}}
    reply = fleet.post("/inference/v1/generate", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "sampling_params.max_tokns")


def test_the_routes_for_token_ids_are_relayed_by_a_gateway(fleet: Server) -> None:
    with running_gateway(fleet.url) as gateway:
        sampling = {"temperature": 0, "max_tokens": 6}
        body = {"model": model_of(fleet), "token_ids": PROMPT, "sampling_params": sampling}
        known = posted(fleet, "/inference/v1/generate", body)["choices"][0]["token_ids"]
        relayed = gateway.client.post("/inference/v1/generate", json=body)
        assert relayed.status_code == 200, relayed.text
        assert relayed.json()["choices"][0]["token_ids"] == known
        streamed = gateway.client.post("/inference/v1/generate", json=body | {"stream": True})
        *events, done = data_of(streamed.text)
        assert done == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert [id for choice in choices for id in choice["token_ids"]] == known
        sampled = {"sampling_params": {"temperature": 0, "max_new_tokens": 6}, "input_ids": PROMPT}
        assert gateway.client.post("/generate", json=sampled).json()["output_ids"] == known
        messages = [{"role": "user", "content": "Say hello"}]
        chat = {"model": body["model"], "messages": messages, "max_tokens": 4}
        rendered = gateway.client.post("/v1/chat/completions/render", json=chat)
        assert rendered.json()["token_ids"]
        refused = gateway.client.post("/inference/v1/generate", json=body | {"features": {"a": 1}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "features")
