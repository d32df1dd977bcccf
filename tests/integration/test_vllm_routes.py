"""What vLLM's server has beside OpenAI's API, on a server with its options for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.server import SYNTHETIC, Server, data_of

HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = ("--enable-tokenizer-info-endpoint", "--enable-force-include-usage")


@pytest.fixture(scope="module")
def vllm_like(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*SYNTHETIC, *OPTIONS, directory=tmp_path_factory.mktemp("serve")) as running:
        yield running


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    *events, done = data_of(reply.text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event with the text of all, however many tokens each has."""
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return events[-1] | {"text": "".join(texts), "finish_reason": choices[-1]["finish_reason"]}


# -- usage in every event


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_forced_usage_is_in_every_event(vllm_like: Server, path: str) -> None:
    body = {"prompt": "a", "messages": HELLO, "max_tokens": 5, "stream": True}
    *events, last = events_of(vllm_like.post(path, body))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5
    assert last["choices"] == []


# -- /invocations


@pytest.mark.parametrize("stream", [False, True])
def test_invocations_are_told_apart_by_their_field(vllm_like: Server, stream: bool) -> None:
    fields = {"max_tokens": 3, "stream": stream, "service_tier": "auto", "seed": 1}
    for own, path in (({"messages": HELLO}, "/v1/chat/completions"), ({"prompt": "a"}, "/v1/completions")):
        invoked, direct = (vllm_like.post(each, own | fields) for each in ("/invocations", path))
        if stream:
            bodies = [joined(events_of(reply)) for reply in (invoked, direct)]
        else:
            bodies = [reply.json() for reply in (invoked, direct)]
        for body in bodies:
            del body["id"], body["created"]
        assert bodies[0] == bodies[1]
        assert bodies[0]["usage"]["completion_tokens"] == 3
        assert bodies[0]["service_tier"] == "default"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "messages (as /v1/chat/completions) or prompt (as /v1/completions)"),
        (b"[1]", "object"),
        (b"{", "JSON"),
        (b'{"prompt": 1, "messages": 2}', "messages"),
    ],
)
def test_invocations_of_nothing_known(vllm_like: Server, body: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{vllm_like.url}/invocations", content=body, headers=headers)
    assert reply.status_code == 400, reply.text
    assert message in reply.json()["error"]["message"]


# -- /tokenizer_info


def test_tokenizer_info(vllm_like: Server) -> None:
    info = vllm_like.get("/tokenizer_info").raise_for_status().json()
    assert info["tokenizer_class"]
    assert "{%" in info["chat_template"]
    assert not [name for name, value in info.items() if name.endswith("_file") or value == str(vllm_like.url)]
    for token in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert isinstance(info.get(token), str | None)


def test_tokenizer_info_is_off_by_default(server: Server) -> None:
    assert server.get("/tokenizer_info").status_code == 404


# -- the load in a header


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
def test_the_load_of_the_engines_is_in_a_header(vllm_like: Server, path: str, stream: bool) -> None:
    body = {"prompt": "a", "messages": HELLO, "max_tokens": 2, "stream": stream}
    reply = vllm_like.post(path, body, **{"endpoint-load-metrics-format": "JSON"})
    kind, _, report = reply.headers["endpoint-load-metrics"].partition(" ")
    metrics = json.loads(report)["named_metrics"]
    assert (kind, set(metrics)) == ("JSON", {"kv_cache_usage_perc", "num_requests_waiting"})
    assert all(isinstance(value, float) for value in metrics.values())
    reply = vllm_like.post(path, body, **{"endpoint-load-metrics-format": "text"})
    text = "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
    assert reply.headers["endpoint-load-metrics"] == text


def test_no_load_without_a_known_format(vllm_like: Server) -> None:
    for headers in ({}, {"endpoint-load-metrics-format": "xml"}):
        reply = vllm_like.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers)
        assert "endpoint-load-metrics" not in reply.headers


# -- null fields


def test_fields_of_vllms_are_attributes_in_openais_client(vllm_like: Server) -> None:
    with openai.OpenAI(base_url=f"{vllm_like.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)  # type: ignore[arg-type]
        completion: Any = client.completions.create(model="m", prompt="a", max_tokens=2)
        card: Any = client.models.retrieve("m")
    assert chat.choices[0].message.reasoning is None
    assert (chat.prompt_logprobs, chat.prompt_token_ids, chat.kv_transfer_params) == (None, None, None)
    assert (chat.choices[0].token_ids, chat.choices[0].stop_reason) == (None, None)
    assert (completion.choices[0].prompt_logprobs, completion.choices[0].token_ids) == (None, None)
    assert completion.kv_transfer_params is None
    assert card.max_model_len > 0
    assert card.permission
