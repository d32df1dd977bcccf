"""Images as openai, anthropic, LangChain, ollama and google-genai send them, each in its own words."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from google import genai
from google.genai import types
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from PIL import Image

from tests.clients.conftest import PYTHON
from tests.clients.scripted import MODEL
from tests.gateway.processes import gateway
from tests.integration.server import Server

TOKENS = 6
"""Of an image of 84 by 56 pixels: the synthetic engine has one for each square of 28."""


def png(red: int = 200) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (84, 56), (red, 30, 30)).save(file, "PNG")
    return file.getvalue()


DATA = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{DATA}"
PART: Any = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
BLOCK: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
STANDARD: Any = {"type": "image", "base64": DATA, "mime_type": "image/png"}
"""LangChain's, which it turns into each API's."""
LOOK: Any = {"type": "text", "text": "Look."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--engine", "synthetic", "--synthetic-image-tokens", "64", "--media-workers", "1")
    with Server(*options, directory=tmp_path_factory.mktemp("images"), python=PYTHON) as running:
        yield running


@pytest.fixture(scope="module")
def translated(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a gateway for which the server speaks chat completions alone."""
    pools = tmp_path_factory.mktemp("translated") / "endpoints.yaml"
    pools.write_text(f"pools:\n- {{name: chat, endpoints: ['{server.url}'], apis: [chat]}}\n")
    with gateway(options=("--endpoints-file", str(pools)), python=PYTHON) as front:
        yield front.url


@pytest.fixture(scope="module", params=["direct", "gateway"])
def url(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "direct":
        yield server.url
        return
    with gateway(server.url, python=PYTHON) as front:
        yield front.url


def read_tokens(usage: Any) -> int:
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0))


def test_openai_chats(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def usage(*parts: Any) -> Any:
            messages: Any = [{"role": "user", "content": [LOOK, *parts]}]
            return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2).usage

        without, one = usage(), usage(PART)
        both = usage(
            PART,
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(9)).decode()}"},
            },
        )
        assert one.prompt_tokens_details.image_tokens == TOKENS
        assert both.prompt_tokens_details.image_tokens == 2 * TOKENS
        assert both.prompt_tokens - one.prompt_tokens >= TOKENS
        assert getattr(without.prompt_tokens_details, "image_tokens", None) is None
        messages: Any = [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}],
            }
        ]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.param == "messages[0].content[0].image_url.url"
        call = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [LOOK, PART]},
        ]
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        [last] = [chunk.usage for chunk in stream if chunk.usage]
        assert last.prompt_tokens_details.image_tokens == TOKENS  # type: ignore[union-attr]


def test_openai_responses(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        image = {"type": "input_image", "image_url": URL, "detail": "auto"}
        given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Look."}, image]}]
        first = client.responses.create(model=MODEL, input=given, max_output_tokens=3)
        assert first.usage.input_tokens_details.image_tokens == TOKENS  # type: ignore[union-attr]
        assert (
            client.responses.input_tokens.count(model=MODEL, input=given).input_tokens
            == first.usage.input_tokens
        )  # type: ignore[union-attr]
        more: Any = [
            {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image]},
        ]
        then = client.responses.create(
            model=MODEL, previous_response_id=first.id, input=more, max_output_tokens=3
        )
        assert then.usage.input_tokens_details.image_tokens == 2 * TOKENS  # type: ignore[union-attr]


def test_translated_requests(translated: str) -> None:
    """The gateway makes chats of them: images in results of tools follow in the user's message."""
    given: Any = [
        {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": URL}],
        },
    ]
    with openai.OpenAI(base_url=f"{translated}/v1", api_key="none", max_retries=0) as client:
        usage = client.responses.create(model=MODEL, input=given, max_output_tokens=3, store=False).usage
        assert usage.input_tokens_details.image_tokens == 2 * TOKENS  # type: ignore[union-attr]
    with anthropic.Anthropic(base_url=translated, api_key="none", max_retries=0) as claude:
        message: Any = {"role": "user", "content": [BLOCK, BLOCK]}
        seen = claude.messages.create(model=MODEL, max_tokens=3, messages=[message]).usage
        assert read_tokens(seen) > 2 * TOKENS


def test_anthropic_messages(url: str) -> None:
    """The second conversation is Claude Code's, after its tool Read has read an image."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        read = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a/pump.png"}}
        result = {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [BLOCK],
            "cache_control": {"type": "ephemeral"},
        }
        tools: Any = [
            {
                "name": "Read",
                "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}},
            }
        ]
        talks: Any = [
            [{"role": "user", "content": [BLOCK, LOOK]}],
            [
                {"role": "user", "content": [LOOK]},
                {"role": "assistant", "content": [read]},
                {"role": "user", "content": [result]},
            ],
        ]
        for messages in talks:
            asked: Any = {"model": MODEL, "messages": messages, "tools": tools}
            with client.messages.stream(**asked, max_tokens=3) as stream:
                usage = stream.get_final_message().usage
            assert read_tokens(usage) == client.messages.count_tokens(**asked).input_tokens > TOKENS
        wrong: Any = {"type": "image", "source": BLOCK["source"] | {"data": ""}}
        with pytest.raises(anthropic.BadRequestError, match="has no base64 of an image"):
            client.messages.create(model=MODEL, max_tokens=3, messages=[{"role": "user", "content": [wrong]}])


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_langchain(url: str, kind: str) -> None:
    llm: Any
    if kind == "openai":
        llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=3, max_retries=0)
    else:
        llm = ChatAnthropic(base_url=url, api_key="none", model=MODEL, max_tokens=3, max_retries=0)
    talk = [HumanMessage([LOOK, STANDARD])]
    plain = llm.invoke([HumanMessage([LOOK])]).usage_metadata["input_tokens"]
    assert llm.invoke(talk).usage_metadata["input_tokens"] >= plain + TOKENS
    call = {"name": "view", "args": {}, "id": "c"}
    talk += [AIMessage("", tool_calls=[call]), ToolMessage([STANDARD], tool_call_id="c")]
    assert llm.invoke(talk).usage_metadata["input_tokens"] >= plain + 2 * TOKENS


def test_ollama(url: str) -> None:
    client = ollama.Client(url)
    assert "vision" in (client.show(MODEL).capabilities or ())
    options = {"num_predict": 3}
    plain = client.generate(MODEL, "Look.", options=options).prompt_eval_count or 0
    seen = client.generate(MODEL, "Look.", images=[png()], options=options).prompt_eval_count or 0
    assert seen >= plain + TOKENS
    message = ollama.Message(role="user", content="Look.", images=[ollama.Image(value=png())])
    assert client.chat(MODEL, [message], options=options).prompt_eval_count == seen


def test_google_genai(url: str) -> None:
    client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url))
    contents: Any = ["Look.", types.Part.from_bytes(data=png(), mime_type="image/png")]
    config = types.GenerateContentConfig(max_output_tokens=3)
    usage = client.models.generate_content(model=MODEL, contents=contents, config=config).usage_metadata
    counted = client.models.count_tokens(model=MODEL, contents=contents).total_tokens
    assert usage.prompt_token_count == counted
    kinds = {each.modality.value: each.token_count for each in usage.prompt_tokens_details}
    assert kinds == {"TEXT": counted - TOKENS, "IMAGE": TOKENS}
