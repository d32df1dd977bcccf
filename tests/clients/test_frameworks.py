"""One round of a tool with agent frameworks; the model follows a script."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.scripted import MODEL, QUESTION, REPORT, RESULT, SAYS, TOOL


def get_speed(name: str) -> str:
    """The speed of a machine.

    Args:
        name: The machine.
    """
    assert name == "pump ä"
    return RESULT


@pytest.mark.parametrize("stream", [False, True])
def test_smolagents(scripted: str, stream: bool) -> None:
    """Its agent ends with a call of its own; the model alone is asked."""
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(MODEL, api_base=f"{scripted}/v1", api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    options = {"tools_to_call_from": [smolagents.tool(get_speed)], "tool_choice": "auto"}
    if stream:
        said = smolagents.models.agglomerate_stream_deltas(list(model.generate_stream(messages, **options)))
    else:
        said = model.generate(messages, **options)
    (call,) = said.tool_calls
    assert (said.content, call.function.name) == (SAYS, TOOL)


def test_haystack(scripted: str) -> None:
    pytest.importorskip("haystack")
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    chat = OpenAIChatGenerator(
        model=MODEL, api_base_url=f"{scripted}/v1", api_key=Secret.from_token("none"), max_retries=0
    )
    pieces: list[str] = []
    agent = Agent(
        chat_generator=chat,
        tools=[create_tool_from_function(get_speed)],
        streaming_callback=lambda chunk: pieces.append(chunk.content),
    )
    assert agent.run([ChatMessage.from_user(QUESTION)])["last_message"].text == REPORT
    assert REPORT in "".join(pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_agno(scripted: str, stream: bool) -> None:
    pytest.importorskip("agno")
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=MODEL, base_url=f"{scripted}/v1", api_key="none")
    agent = Agent(model=model, tools=[get_speed], telemetry=False)
    if stream:
        text = "".join(event.content or "" for event in agent.run(QUESTION, stream=True))
    else:
        text = agent.run(QUESTION).content
    assert text.endswith(REPORT)


@pytest.mark.parametrize("kind", ["openai", "anthropic", "ollama", "google"])
def test_langchain_agents(scripted: str, kind: str) -> None:
    """An agent, which is a graph of LangGraph, over each API."""
    pytest.importorskip("langgraph")
    from langchain.agents import create_agent

    model: Any
    if kind == "openai":
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(base_url=f"{scripted}/v1", api_key="none", model=MODEL, max_retries=0)
    elif kind == "anthropic":
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(base_url=scripted, api_key="none", model=MODEL, max_retries=0, max_tokens=300)
    elif kind == "ollama":
        from langchain_ollama import ChatOllama

        model = ChatOllama(base_url=scripted, model=MODEL)
    else:
        from langchain_google_genai import ChatGoogleGenerativeAI

        model = ChatGoogleGenerativeAI(base_url=scripted, api_key="none", model=MODEL, max_retries=1)
    agent = create_agent(model, tools=[get_speed])
    pieces: dict[str, str] = {}
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    for piece, _ in agent.stream(question, stream_mode="messages"):
        if piece.type == "AIMessageChunk":
            pieces[piece.id] = pieces.get(piece.id, "") + piece.text
    assert list(pieces.values()) == [SAYS, REPORT]
