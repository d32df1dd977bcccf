"""The google-genai package: a round of functions, streamed and not."""

from __future__ import annotations

import pytest
from google import genai
from google.genai import errors, types

from tests.clients.scripted import MODEL, QUESTION, REPORT, RESULT, SAYS, THOUGHT, TOOL

FUNCTION = types.FunctionDeclaration(
    name=TOOL,
    description="Say how fast something is.",
    parameters=types.Schema(type="OBJECT", properties={"name": types.Schema(type="STRING")}),
)
CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=[FUNCTION])],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    thinking_config=types.ThinkingConfig(include_thoughts=True),
)


@pytest.fixture(params=["v1", "v1beta"])
def client(scripted: str, request: pytest.FixtureRequest) -> genai.Client:
    options = types.HttpOptions(base_url=scripted, api_version=request.param)
    return genai.Client(api_key="none", http_options=options)


def turn(client: genai.Client, contents: list[types.Content], *, stream: bool) -> list[types.Part]:
    if not stream:
        whole = client.models.generate_content(model=MODEL, contents=contents, config=CONFIG)
        return whole.candidates[0].content.parts
    parts: list[types.Part] = []
    for chunk in client.models.generate_content_stream(model=MODEL, contents=contents, config=CONFIG):
        parts += chunk.candidates[0].content.parts or []
    assert chunk.candidates[0].finish_reason == "STOP"
    assert chunk.usage_metadata.prompt_token_count
    assert chunk.usage_metadata.candidates_token_count
    return parts


def text_of(parts: list[types.Part], *, thought: bool = False) -> str:
    return "".join(part.text or "" for part in parts if bool(part.thought) == thought)


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_of_functions(client: genai.Client, stream: bool) -> None:
    contents = [types.Content(role="user", parts=[types.Part(text=QUESTION)])]
    parts = turn(client, contents, stream=stream)
    assert (text_of(parts), text_of(parts, thought=True)) == (SAYS, THOUGHT)
    [call] = [part.function_call for part in parts if part.function_call]
    assert (call.name, call.args) == (TOOL, {"name": "pump ä"})
    result = types.Part.from_function_response(name=TOOL, response={"output": RESULT})
    contents += [types.Content(role="model", parts=parts), types.Content(role="user", parts=[result])]
    assert text_of(turn(client, contents, stream=stream)) == REPORT


def test_counts_and_errors(client: genai.Client) -> None:
    assert client.models.count_tokens(model=MODEL, contents=QUESTION).total_tokens
    with pytest.raises(errors.ClientError, match="does not exist") as caught:
        client.models.generate_content(model="nobody", contents="Hi")
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
