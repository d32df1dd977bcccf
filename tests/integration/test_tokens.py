"""Token ids in and out, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.server import Server, data_of

pytest.importorskip("torch")

PROMPT = "The with statement is used to wrap"
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server("--dtype", "float32", "--threads", "1", directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


def generated(server: Server, ids: list[int], sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = server.post(GENERATE, {"token_ids": ids, "sampling_params": sampling, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def events(server: Server, ids: list[int], sampling: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    reply = server.post(GENERATE, {"token_ids": ids, "sampling_params": sampling, "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    *data, done = data_of(reply.text)
    assert done == "[DONE]"
    return [json.loads(each) for each in data]


def test_ids_are_those_of_a_completion(demo: Server) -> None:
    known = demo.complete(PROMPT, temperature=0, max_tokens=12, return_token_ids=True)["choices"][0]
    ids, sampling = known["prompt_token_ids"], {"temperature": 0, "max_tokens": 12, "logprobs": 2}
    whole = generated(demo, ids, sampling, return_token_ids=True)
    [choice] = whole["choices"]
    assert choice["token_ids"] == known["token_ids"]
    assert whole["prompt_token_ids"] == ids
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (len(ids), 12)
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == known["token_ids"]
    assert all(entry["rank"] == 1 and len(entry["top_logprobs"]) == 2 for entry in content)
    streamed = events(demo, ids, sampling)
    choices = [choice for event in streamed for choice in event["choices"]]
    assert [id for each in choices for id in each["token_ids"]] == known["token_ids"]
    parts = [each["logprobs"]["content"] for each in choices]
    assert [entry for part in parts for entry in part] == content
    text = generated(demo, ids, sampling, output_mode="text")["choices"][0]["text"]
    assert text == known["text"]


def test_several_outputs_of_one_prompt(demo: Server) -> None:
    sampling = {"n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    whole = generated(demo, [1, 2, 3], sampling)
    streamed = events(demo, [1, 2, 3], sampling, stream_options={"include_usage": True})
    for index, choice in enumerate(whole["choices"]):
        parts = [each for event in streamed for each in event["choices"] if each["index"] == index]
        assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]
        assert len(choice["token_ids"]) == 8
    assert streamed[-1]["usage"]["completion_tokens"] == 24


def test_errors_name_the_field(demo: Server) -> None:
    for fields, param in (
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"token_ids": [1 << 30]}, "token_ids"),
    ):
        reply = demo.post(GENERATE, {"token_ids": [1], "sampling_params": {}} | fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_listed_tokens_have_their_logprobs_everywhere(demo: Server) -> None:
    known = demo.complete(PROMPT, temperature=0, max_tokens=4, return_token_ids=True, logprobs=3)["choices"][
        0
    ]
    ids, sampled = known["prompt_token_ids"], known["token_ids"]
    listed = [sampled[1], sampled[0]]
    sampling = {"temperature": 0, "max_tokens": 4, "logprob_token_ids": listed}
    first, *_ = generated(demo, ids, sampling)["choices"][0]["logprobs"]["content"]
    assert [each["token_id"] for each in first["top_logprobs"]] == [sampled[0], sampled[1]]
    assert first["logprob"] == pytest.approx(known["logprobs"]["token_logprobs"][0], abs=1e-4)
    other = first["top_logprobs"][1]["logprob"]
    options = {"temperature": 0, "max_tokens": 4, "logprob_token_ids": listed}
    completed = demo.complete(ids, return_tokens_as_token_ids=True, **options)["choices"][0]["logprobs"]
    assert completed["top_logprobs"][0] == {
        f"token_id:{sampled[0]}": pytest.approx(first["logprob"], abs=1e-4),
        f"token_id:{sampled[1]}": pytest.approx(other, abs=1e-4),
    }
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, **options}
    reply = demo.post("/v1/chat/completions", chat)
    assert reply.status_code == 200, reply.text
    entry = reply.json()["choices"][0]["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 2
    refused = demo.post("/v1/chat/completions", chat | {"logprobs": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")


def test_sglangs_route_has_the_same_tokens(demo: Server) -> None:
    known = demo.complete(
        PROMPT, temperature=0, max_tokens=6, return_token_ids=True, logprobs=2, prompt_logprobs=2
    )["choices"][0]
    ids, sampling = known["prompt_token_ids"], {"temperature": 0, "max_new_tokens": 6}
    body = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    reply = demo.post("/generate", {**body, "input_ids": ids, "logprob_start_len": 0})
    assert reply.status_code == 200, reply.text
    made = reply.json()
    meta = made["meta_info"]
    assert (made["text"], made["output_ids"]) == (known["text"], known["token_ids"])
    assert [entry[1] for entry in meta["output_token_logprobs"]] == known["token_ids"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    scored = zip(known["prompt_logprobs"], ids, strict=True)
    expected = [each and each[str(token)]["logprob"] for each, token in scored]
    assert [entry[0] for entry in meta["input_token_logprobs"]][1:] == pytest.approx(expected[1:], abs=1e-4)
    assert [len(each) for each in meta["output_top_logprobs"]] == [2] * 6
    streamed = demo.post("/generate", {**body, "text": PROMPT, "stream": True})
    *data, done = data_of(streamed.text)
    assert done == "[DONE]"
    last = json.loads(data[-1])
    assert (last["text"], last["output_ids"]) == (known["text"], known["token_ids"])
    assert last["meta_info"]["output_token_logprobs"] == [
        [pytest.approx(value, abs=1e-4), token, None] for value, token, _ in meta["output_token_logprobs"]
    ]
    two = demo.post("/generate", {"text": [PROMPT, "def"], "sampling_params": {**sampling, "n": 1}}).json()
    assert [each["index"] for each in two] == [0, 1]
    assert two[0]["output_ids"] == known["token_ids"]


def test_a_rendered_chat_generates_what_the_chat_does(demo: Server) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    known = demo.post("/v1/chat/completions", chat | {"return_token_ids": True}).json()
    request = demo.post("/v1/chat/completions/render", chat).json()
    assert request["token_ids"] == known["prompt_token_ids"]
    made = demo.post(GENERATE, request).json()
    assert made["choices"][0]["token_ids"] == known["choices"][0]["token_ids"]
    assert made["request_id"].startswith("generate-tokens-chatcmpl-")
    two = demo.post("/v1/completions/render", {"prompt": [PROMPT, "def"], "max_tokens": 4}).json()
    assert [each["sampling_params"]["max_tokens"] for each in two] == [4, 4]
    refused = demo.post("/v1/chat/completions/render", chat | {"echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


def test_the_next_turn_begins_with_what_was_sampled(demo: Server) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    known: list[int] = []
    for turn in range(3):
        fields = {"messages": messages, "max_tokens": 6, "temperature": 1.0, "seed": turn, "ignore_eos": True}
        reply = demo.post("/v1/chat/completions", fields | {"return_token_ids": True})
        assert reply.status_code == 200, reply.text
        body = reply.json()
        [choice] = body["choices"]
        prompt = body["prompt_token_ids"]
        assert prompt[: len(known)] == known
        assert len(choice["token_ids"]) == 6
        known = [*prompt, *choice["token_ids"]]
        ids = {"token_ids": choice["token_ids"], "prompt_token_ids": prompt}
        messages += [choice["message"] | ids, {"role": "user", "content": "And then?"}]
        counted = demo.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert counted[: len(known)] == known


def test_render_generate_and_derender_are_a_chat(demo: Server) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    chat |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    known = demo.post("/v1/chat/completions", chat).json()
    request = demo.post("/v1/chat/completions/render", chat).json()
    generated = demo.post(GENERATE, request).json()
    body = {"generate_response": generated, "chat_request": chat, "prompt_token_ids": request["token_ids"]}
    reply = demo.post("/v1/chat/completions/derender", body)
    assert reply.status_code == 200, reply.text
    made = reply.json()
    assert made["choices"] == known["choices"]
    assert made["prompt_token_ids"] == known["prompt_token_ids"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert made["usage"][name] == known["usage"][name]
