"""OpenAI's agents SDK over chat completions."""

from __future__ import annotations

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

from tests.clients.shapes import MODEL, QUESTION, Answer, add

ADD = function_tool(add)


def agent(url: str, **options: object) -> Agent[None]:
    client = AsyncOpenAI(base_url=url, api_key="none")
    settings = ModelSettings(temperature=0, max_tokens=300)
    model = OpenAIChatCompletionsModel(MODEL, openai_client=client)
    fields = {"model_settings": settings} | options
    return Agent(name="Helper", instructions="Be brief.", model=model, **fields)  # type: ignore[arg-type]


def test_text(url: str) -> None:
    assert Runner.run_sync(agent(url), QUESTION).final_output


def test_a_tool_that_the_model_may_call(url: str) -> None:
    assert Runner.run_sync(agent(url, tools=[ADD]), QUESTION, max_turns=5).final_output


def test_a_tool_that_it_must_call(url: str) -> None:
    """The agent resets the choice after the call, so that the next turn is an answer."""
    settings = ModelSettings(tool_choice="required", max_tokens=300, parallel_tool_calls=False)
    run = Runner.run_sync(
        agent(url, tools=[ADD], model_settings=settings, tool_use_behavior="stop_on_first_tool"), QUESTION
    )
    assert run.final_output in ("0", "1", "2")


def test_output_type(url: str) -> None:
    assert isinstance(Runner.run_sync(agent(url, output_type=Answer), QUESTION).final_output, Answer)


def test_a_streamed_run(url: str) -> None:
    async def main() -> tuple[int, str]:
        run = Runner.run_streamed(agent(url, tools=[ADD]), QUESTION, max_turns=5)
        count = sum([1 async for _ in run.stream_events()])
        return count, run.final_output

    count, output = asyncio.run(main())
    assert count > 3
    assert output
