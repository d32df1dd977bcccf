"""The request that only prefills, for vLLM's connectors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.gateway.disaggregation.prefill_request import CHAT, COMPLETIONS, prefill_body, transfer_params

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefilled(path: str, **fields: Any) -> Any:
    body = prefill_body(path, msgspec.json.encode(fields))
    return None if body is None else msgspec.json.decode(body)


def test_one_token_not_streamed_with_everything_that_shapes_the_prompt() -> None:
    body = prefilled(
        COMPLETIONS,
        model="m",
        prompt="p",
        max_tokens=100,
        min_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        cache_salt="s",
        temperature=0.5,
    )
    assert body == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 1,
        "stream": False,
        "cache_salt": "s",
        "temperature": 0.5,
        "kv_transfer_params": ASKED,
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = prefilled(CHAT, model="m", messages=[], tools=tools, max_completion_tokens=7, n=1)
    assert (chat["max_tokens"], chat["max_completion_tokens"], chat["tools"]) == (1, 1, tools)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"kv_transfer_params": {"do_remote_prefill": True}},
    ],
)
def test_what_the_endpoint_that_answers_has_to_compute_itself(fields: dict[str, Any]) -> None:
    assert prefilled(COMPLETIONS, prompt="p", **fields) is None


@pytest.mark.parametrize("fields", [{"n": None}, {"echo": False}, {"prompt_logprobs": None}, {"best_of": 1}])
def test_defaults_are_no_obstacle(fields: dict[str, Any]) -> None:
    assert prefilled(COMPLETIONS, prompt="p", **fields) is not None


@pytest.mark.parametrize("prompt", [["p", "q"], [[1], [2]], [[1, 2], "q"], []])
def test_parameters_for_several_prompts_would_be_those_of_one(prompt: list[Any]) -> None:
    assert prefilled(COMPLETIONS, prompt=prompt) is None


@pytest.mark.parametrize("prompt", ["p", ["p"], [1, 2], [[1, 2]]])
def test_one_prompt_may_be_written_in_many_ways(prompt: Any) -> None:
    assert prefilled(COMPLETIONS, prompt=prompt)["prompt"] == prompt


def test_other_apis_and_malformed_bodies_are_left_alone() -> None:
    assert prefilled("/v1/responses", input="p") is None
    assert prefill_body(COMPLETIONS, b"[") is None
    assert prefill_body(COMPLETIONS, b"[]") is None


@pytest.mark.parametrize(
    ("reply", "params"),
    [
        (b'{"choices":[],"kv_transfer_params":{"remote_host":"h"}}', b'{"remote_host":"h"}'),
        (b'{"choices":[],"kv_transfer_params":null}', None),
        (b'{"choices":[]}', None),
        (b'{"choices":[],"kv_transfer_params":{}}', None),
        (b'{"choices":[{"finish_reason":"length"}],"error":null}', None),
        (b'{"kv_transfer_params":{"a":1}}', b'{"a":1}'),
    ],
)
def test_what_the_connector_says_is_handed_on_as_it_is(reply: bytes, params: bytes | None) -> None:
    assert transfer_params(reply) == params


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"detail":"CUDA error"}',
        b'{"error":{"message":"CUDA error","code":500}}',
        b'{"error":"out of memory","choices":[],"kv_transfer_params":{"remote_host":"h"}}',
        b'{"object":"error","message":"CUDA error","type":"InternalServerError"}',
        b'{"choices":[],"kv_transfer_params":[1]}',
        b'{"choices":[],"kv_transfer_params":"h"}',
        b'{"choices":[],"kv_transfer_params":true}',
        b'{"choices":[{"finish_reason":"error"}],"kv_transfer_params":{"remote_host":"h"}}',
        b'{"choices":{}}',
    ],
)
def test_what_is_no_reply_is_refused(reply: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        transfer_params(reply)
