"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.shapes import MODEL, QUESTION, Answer, add

ADD = tool(add)


def model(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=url,
        api_key="none",
        model=MODEL,
        **{"max_tokens": 300, "temperature": 0, "max_retries": 0} | options,
    )


def test_an_answer_streamed_and_not(url: str) -> None:
    llm = model(url, max_tokens=30, seed=1, stop=["zzz"], stream_usage=True)
    whole = llm.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert whole.usage_metadata
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(llm.stream([SystemMessage("Be brief."), HumanMessage(QUESTION)]))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert joined.text == whole.text
    assert joined.usage_metadata
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_batches_and_async(url: str) -> None:
    llm = model(url, max_tokens=5)
    assert len(llm.batch([QUESTION, "Who are you?"])) == 2

    async def main() -> str:
        return "".join([piece.text async for piece in llm.astream(QUESTION)])

    assert asyncio.run(main())


def test_logprobs_and_choices(url: str) -> None:
    llm = model(url, max_tokens=5, logprobs=True, top_logprobs=2, n=2, temperature=1)
    reply = llm.generate([[HumanMessage(QUESTION)]])
    assert len(reply.generations[0]) == 2
    assert len(reply.generations[0][0].message.response_metadata["logprobs"]["content"]) == 5


@pytest.mark.parametrize("choice", ["any", "required", "add", True])
def test_a_forced_call(url: str, choice: Any) -> None:
    reply = model(url).bind_tools([ADD], tool_choice=choice, parallel_tool_calls=False).invoke(QUESTION)
    assert isinstance(reply, AIMessage)
    [call] = reply.tool_calls
    assert call["name"] == "add"
    result = ADD.invoke(call)
    assert isinstance(result, ToolMessage)
    after = model(url, max_tokens=9).invoke([HumanMessage(QUESTION), reply, result])
    assert after.text


def test_a_streamed_forced_call(url: str) -> None:
    pieces = list(model(url).bind_tools([ADD], tool_choice="any").stream(QUESTION))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert [call["name"] for call in joined.tool_calls] == ["add"] * len(joined.tool_calls)
    assert joined.tool_calls
    assert not joined.invalid_tool_calls


def test_tools_without_a_choice(url: str) -> None:
    reply = model(url, max_tokens=60).bind_tools([ADD]).invoke(QUESTION)
    assert reply.text or reply.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(url: str, method: Any) -> None:
    for seed in range(3):
        llm = model(url, seed=seed, temperature=1)
        assert isinstance(llm.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)
    schema = Answer.model_json_schema()
    assert Answer.model_validate(model(url).with_structured_output(schema, method=method).invoke(QUESTION))


def test_json_mode(url: str) -> None:
    reply = model(url).with_structured_output(None, method="json_mode").invoke("Answer in JSON: " + QUESTION)
    assert isinstance(reply, dict)


def test_legacy_completions(url: str) -> None:
    llm = OpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=5)
    assert llm.invoke("The with statement")
    assert "".join(llm.stream("The with statement"))
