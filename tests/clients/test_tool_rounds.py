"""One streamed round of a tool with every SDK over each of its APIs; the model follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.scripted import MODEL, QUESTION, REPORT, RESULT, SAYS, THOUGHT, TOOL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
DESCRIPTION = "The speed of a machine."


def get_speed(name: str) -> str:
    """The speed of a machine.

    Args:
        name: The machine.
    """
    assert name == "pump ä"
    return RESULT


@pytest.fixture
def openai_client(scripted: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(scripted: str) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=scripted, api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(openai_client: Any) -> None:
    function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        with openai_client.chat.completions.stream(
            model=MODEL, messages=messages, tools=[{"type": "function", "function": function}]
        ) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0]

    first = ask()
    (call,) = first.message.tool_calls
    assert (first.message.content, first.finish_reason) == (SAYS, "tool_calls")
    assert first.message.reasoning == THOUGHT
    messages.append(first.message.model_dump(exclude_none=True, exclude={"parsed"}))
    for each in messages[-1]["tool_calls"]:
        each["function"].pop("parsed_arguments", None)
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "content": get_speed(**json.loads(call.function.arguments))}
    )
    assert ask().message.content == REPORT


@pytest.mark.parametrize("stored", [True, False])
def test_openai_responses(openai_client: Any, stored: bool) -> None:
    tools = [
        {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}
    ]

    def ask(items: list[Any], **options: Any) -> Any:
        with openai_client.responses.stream(
            model=MODEL, input=items, tools=tools, store=stored, **options
        ) as stream:
            events = [event.type for event in stream]
            assert events[-1] == "response.completed"
            return stream.get_final_response()

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(items, include=["reasoning.encrypted_content"])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == SAYS
    call = first.output[-1]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": get_speed(**json.loads(call.arguments)),
    }
    if stored:
        second = ask([result], previous_response_id=first.id)
    else:
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        second = ask([*items, *output, result])
    assert second.output_text == REPORT


def test_anthropic(anthropic_client: Any) -> None:
    tools = [{"name": TOOL, "description": DESCRIPTION, "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        with anthropic_client.messages.stream(
            model=MODEL, max_tokens=2000, messages=messages, tools=tools, thinking=thinking
        ) as stream:
            for _ in stream:
                pass
            return stream.get_final_message()

    first = ask()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    thought, text, call = first.content
    assert (thought.thinking, text.text, first.stop_reason) == (THOUGHT, SAYS, "tool_use")
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_speed(**call.input)}
    messages.append({"role": "user", "content": [result]})
    assert ask().content[-1].text == REPORT


def test_anthropic_tool_runner(anthropic_client: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    runner = anthropic_client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=2000,
        tools=[anthropic.beta_tool(get_speed)],
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
    )
    final = None
    for stream in runner:
        final = stream.get_final_message()
    assert final is not None
    assert final.content[-1].text == REPORT


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents(scripted: str, api: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(
        name="Helper",
        instructions="Be brief.",
        model=kind(MODEL, openai_client=client),
        tools=[agents.function_tool(get_speed)],
    )

    async def main() -> tuple[list[str], str]:
        run = agents.Runner.run_streamed(agent, QUESTION)
        types = [event.item.type async for event in run.stream_events() if hasattr(event, "item")]
        await client.close()
        return types, run.final_output

    types, output = asyncio.run(main())
    assert output == REPORT
    assert [each for each in types if each != "reasoning_item"] == [
        "message_output_item",
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(scripted: str, responses: bool) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    speed = tool(get_speed)
    model = ChatOpenAI(
        base_url=f"{scripted}/v1",
        api_key="none",
        model=MODEL,
        max_retries=0,
        use_responses_api=responses,
    ).bind_tools([speed])

    def ask(messages: list[Any]) -> Any:
        joined, *pieces = list(model.stream(messages))
        for piece in pieces:
            joined += piece
        return joined

    first = ask([HumanMessage(QUESTION)])
    assert first.text == SAYS
    (call,) = first.tool_calls
    after = ask([HumanMessage(QUESTION), first, speed.invoke(call)])
    assert after.text == REPORT


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai(scripted: str, api: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model: Any
    if api == "anthropic":
        pytest.importorskip("anthropic")
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=scripted, api_key="none"))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind(MODEL, provider=OpenAIProvider(base_url=f"{scripted}/v1", api_key="none"))
    agent = Agent(model, tools=[get_speed])

    async def main() -> str:
        """run_stream ends with the first text; iter streams every turn."""
        async with agent.iter(QUESTION) as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        async for _ in stream:
                            pass
        return str(run.result.output if run.result else None)

    assert asyncio.run(main()) == REPORT


@pytest.mark.parametrize(("provider", "path"), [("hosted_vllm", "/v1"), ("anthropic", "")])
def test_litellm_chat(scripted: str, provider: str, path: str) -> None:
    litellm = pytest.importorskip("litellm")
    function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        chunks = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=f"{scripted}{path}",
            api_key="none",
            messages=messages,
            tools=[{"type": "function", "function": function}],
            stream=True,
        )
        return litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0].message

    first = ask()
    (call,) = first.tool_calls
    assert first.content == SAYS
    messages += [
        first,
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_speed(**json.loads(call.function.arguments)),
        },
    ]
    assert ask().content == REPORT


def test_litellm_responses(scripted: str) -> None:
    litellm = pytest.importorskip("litellm")
    tools = [{"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}]

    def ask(items: list[Any]) -> Any:
        events = list(
            litellm.responses(
                model=f"openai/{MODEL}",
                api_base=f"{scripted}/v1",
                api_key="none",
                input=items,
                tools=tools,
                stream=True,
            )
        )
        return events[-1].response

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(items)
    call = first.output[-1]
    output = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in first.output]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": get_speed(**json.loads(call.arguments)),
    }
    assert ask([*items, *output, result]).output[-1].content[0].text == REPORT
