"""Agents of pydantic-ai."""

from __future__ import annotations

import asyncio

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from tests.clients.shapes import MODEL, QUESTION, Answer, add


def model(url: str) -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))


SETTINGS = {"max_tokens": 300, "temperature": 0.0}


def test_text(url: str) -> None:
    agent = Agent(model(url), instructions="Be brief.", model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output


def test_streamed_text(url: str) -> None:
    agent = Agent(model(url), model_settings=SETTINGS)

    async def main() -> str:
        async with agent.run_stream(QUESTION) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    assert asyncio.run(main()) == agent.run_sync(QUESTION).output


@pytest.mark.parametrize("wanted", [Answer, ToolOutput(Answer), NativeOutput(Answer), bool], ids=str)
def test_output_type(url: str, wanted: object) -> None:
    agent = Agent(model(url), output_type=wanted, model_settings=SETTINGS)
    output = agent.run_sync(QUESTION).output
    assert isinstance(output, bool if wanted is bool else Answer)


def test_streamed_output_type(url: str) -> None:
    agent = Agent(model(url), output_type=Answer, model_settings=SETTINGS)

    async def main() -> Answer:
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    assert isinstance(asyncio.run(main()), Answer)


def test_a_tool_that_the_model_may_call(url: str) -> None:
    agent = Agent(model(url), tools=[add], model_settings=SETTINGS)
    assert agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=5)).output


def test_a_tool_and_an_output_type(url: str) -> None:
    """pydantic-ai asks for some call, of the tool or of the output."""
    agent = Agent(model(url), output_type=Answer, tools=[add], model_settings=SETTINGS | {"seed": 1})
    with agent.parallel_tool_call_execution_mode("sequential"):
        run = agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=20))
    assert isinstance(run.output, Answer)
