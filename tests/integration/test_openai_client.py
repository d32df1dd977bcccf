"""What users do: the openai client against a real server."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from .server import SYNTHETIC, Server


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
    assert events[-1].usage == whole.usage
    assert events[-1].choices == []
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * 11 + ["length"]


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
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="m", prompt="x", temperature=-1)


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
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert [httpx.get(f"{server.url}/{probe}").status_code for probe in ("health", "ready", "ping")] == [
            200
        ] * 3


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
