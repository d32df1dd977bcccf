"""What users do: the openai client against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.generation.replying import without_nulls
from tests.integration.server import SYNTHETIC, Server, wait_until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_completion_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="hello", max_tokens=12, seed=5)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    events = list(
        client.completions.create(
            model="m",
            prompt="hello",
            max_tokens=12,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert events[-1].usage is not None
    assert without_nulls(events[-1].usage.to_dict()) == without_nulls(whole.usage.to_dict())
    assert events[-1].choices == []
    *before, last = [event.choices[0].finish_reason for event in events[:-1]]
    assert set(before) <= {None}
    assert last == "length"


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=9, seed=1)  # type: ignore[arg-type]
    assert whole.choices[0].message.role == "assistant"
    events = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=messages, max_completion_tokens=9, seed=1, stream=True
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == "length"


def test_several_choices_and_prompts(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt=["a", "b"], n=2, max_tokens=4, seed=3, temperature=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text != reply.choices[1].text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    streamed = ["", "", "", ""]
    for event in client.completions.create(
        model="m", prompt=["a", "b"], n=2, max_tokens=4, seed=3, temperature=1, stream=True
    ):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == [choice.text for choice in reply.choices]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        client.completions.create(model="other", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.completions.create(model="m", prompt="x", temperature=-1)
    assert (refused.value.type, refused.value.param) == ("BadRequestError", "temperature")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=HELLO, temperature=-1, stream=True)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="m", prompt="x", max_tokens=2000, extra_body={"ignore_eos": True}
        )


def test_requests_refused_for_a_while_are_tried_again(tmp_path: Path) -> None:
    statuses: list[int] = []
    hooks = {"response": [lambda response: statuses.append(response.status_code)]}
    with (
        Server(*SYNTHETIC, directory=tmp_path) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=60,
            http_client=httpx.Client(event_hooks=hooks),
        ) as client,
    ):
        [engine] = server.children("engine")
        engine.kill()

        def noticed() -> bool:
            down = server.get("/ready").status_code == 503
            return down or any(other.pid != engine.pid for other in server.children("engine"))

        wait_until(noticed, 90, "the engine's end")
        assert client.completions.create(model="m", prompt="x", max_tokens=3).choices
    assert set(statuses[:-1]) <= {503}
    assert statuses[-1] == 200


def test_a_stream_that_fails_raises_after_its_tokens(tmp_path: Path) -> None:
    with (
        Server(*SYNTHETIC, "--synthetic-fault", "stream-error@5", directory=tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        events = client.completions.create(model="m", prompt="x", max_tokens=20, stream=True)
        assert next(events).choices[0].text
        with pytest.raises(openai.APIError) as caught:
            list(events)
        assert caught.value.code == "engine_error"


def test_the_helpers_for_streams_and_raw_replies(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="m", messages=HELLO, max_completion_tokens=9, seed=1, stream_options={"include_usage": True}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == text
    assert final.usage is not None
    assert final.usage.completion_tokens == 9
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=HELLO, max_completion_tokens=9, seed=1
    )
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == text


def test_logprobs_in_both_shapes(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="x", max_tokens=4, seed=1, logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == whole.choices[0].text
    assert [len(each) for each in logprobs.top_logprobs or []] == [2] * 4
    chat = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=4, seed=1, logprobs=True, top_logprobs=3
    )
    entries = chat.choices[0].logprobs
    assert entries is not None
    assert [len(entry.top_logprobs) for entry in entries.content or []] == [3] * 4


def test_fields_beyond_openais_go_through_extra_body(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="m",
        messages=HELLO,
        max_tokens=5,
        user="u",
        metadata={"a": "b"},
        extra_headers={"X-Request-Id": "mine"},
        extra_body={"return_token_ids": True, "ignore_eos": True, "top_k": 5, "priority": -1},
    )
    assert reply.id == "chatcmpl-mine"
    assert reply.choices[0].model_extra is not None
    assert len(reply.choices[0].model_extra["token_ids"]) == 5
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model="m", prompt="x", suffix="y")


def test_fields_that_only_advise_are_accepted(client: openai.OpenAI) -> None:
    """The reply has a service tier if the request has one, as OpenAI's."""
    advice: dict[str, Any] = {
        "service_tier": "flex",
        "store": True,
        "verbosity": "low",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
    }
    request: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 3}
    assert client.chat.completions.create(**request).service_tier is None
    assert client.chat.completions.create(**request, **advice).service_tier == "default"
    events = list(client.chat.completions.create(**request, **advice, stream=True))
    assert {event.service_tier for event in events} == {"default"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ],
)
def test_an_error_names_its_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="m", messages=HELLO, extra_body=fields)
    assert error.value.param == param


def test_an_error_names_its_header(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="m", messages=HELLO, extra_headers={"X-data-parallel-rank": "9"})
    assert error.value.param == "X-data-parallel-rank"


def test_a_body_that_is_planned_in_a_thread(client: openai.OpenAI) -> None:
    large = {"text": "x" * 300_000}
    reply = client.chat.completions.create(model="m", messages=HELLO, max_tokens=3, metadata=large)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=HELLO, temperature=-1, metadata=large)


@pytest.mark.slow
def test_a_real_model(tiny_llama: Server) -> None:
    with openai.OpenAI(base_url=f"{tiny_llama.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            model="tiny-llama", messages=HELLO, max_tokens=12, temperature=0, logprobs=True
        )
        events = client.chat.completions.create(
            model="tiny-llama", messages=HELLO, max_tokens=12, temperature=0, stream=True
        )
        text = "".join(event.choices[0].delta.content or "" for event in events)
        assert whole.choices[0].message.content == text
        entries = whole.choices[0].logprobs
        assert entries is not None
        assert "".join(entry.token for entry in entries.content or []) == text
        prompts = client.completions.create(
            model="tiny-llama", prompt=[[5, 6, 7], [8, 9]], max_tokens=4, n=2, temperature=1, seed=1
        )
        assert len({choice.text for choice in prompts.choices}) == 4


def test_keys_guard_everything_but_probes(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, "--api-key", "one", "two", directory=tmp_path) as server:
        for key, allowed in (("one", True), ("two", True), ("three", False)):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            if allowed:
                assert client.completions.create(model="m", prompt="x", max_tokens=1).choices
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.completions.create(model="m", prompt="x", max_tokens=1)
            client.close()
        assert server.get("/metrics").status_code == 401
        assert [server.get(f"/{probe}").status_code for probe in ("health", "ready", "ping")] == [200] * 3


def test_many_at_once(server: Server) -> None:
    async def run() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> int:
                stream = await client.completions.create(
                    model="m", prompt="x", max_tokens=20, seed=seed, stream=True
                )
                return len([event async for event in stream])

            return await asyncio.gather(*(one(seed) for seed in range(50)))

    assert all(1 <= events <= 20 for events in asyncio.run(run()))
