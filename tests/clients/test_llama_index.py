"""llama-index's OpenAILike."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.shapes import MODEL, QUESTION, Answer, add


def model(url: str, **options: object) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=300,
        temperature=0,
        max_retries=0,
        **options,
    )


def test_an_answer_streamed_and_not(url: str) -> None:
    asked = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    whole = model(url).chat(asked).message.content
    assert whole
    assert "".join(piece.delta or "" for piece in model(url).stream_chat(asked)) == whole


def test_completions(url: str) -> None:
    assert model(url, context_window=2048).complete(QUESTION).text


def test_a_forced_call(url: str) -> None:
    tool = FunctionTool.from_defaults(fn=add)
    reply = model(url).predict_and_call([tool], QUESTION, tool_required=True)
    assert reply.response in ("0", "1", "2")


def test_tools_without_a_choice(url: str) -> None:
    reply = model(url).chat_with_tools([FunctionTool.from_defaults(fn=add)], user_msg=QUESTION)
    assert reply.message.content or reply.message.additional_kwargs


def test_structured_output(url: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    assert isinstance(model(url).structured_predict(Answer, PromptTemplate(QUESTION)), Answer)
    asked = [ChatMessage(role="user", content=QUESTION)]
    assert isinstance(model(url).as_structured_llm(Answer).chat(asked).raw, Answer)
