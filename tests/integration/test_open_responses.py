"""The compliance cases of Open Responses (openresponses.org) against a real server.

Each reply and each event is validated with the models that are generated from the published specification.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.dialects.responses.reading import events_of, final_response
from tests.integration.server import SYNTHETIC, Server

specification = pytest.importorskip("openresponses_types")

SCRIPT: dict[str, Any] = {
    "rules": [
        {
            "match": {"last": "tool"},
            "reply": {"text": "It is 18 °C in San Francisco."},
        },
        {
            "match": {"text": "weather"},
            "reply": {
                "calls": [{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}],
            },
        },
        {
            "match": {"text": "Patch"},
            "reply": {"calls": [{"name": "patch", "arguments": {"input": "*** Begin\n"}}]},
        },
        {
            "match": {"text": "Fail"},
            "reply": {"text": "It goes well at first."},
            "end": "error",
            "after-tokens": 3,
        },
        {"match": {"text": "Think"}, "reply": {"reasoning": "First one, then the other.", "text": "Both."}},
        {"reply": {"text": 'Hello, "Alice"!'}},
    ]
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state"}},
        "required": ["location"],
    },
}
PIXEL = base64.b64encode(b"not really a picture").decode()


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


ASKED_FOR_WEATHER = {
    "input": [message("user", "What's the weather like in San Francisco?")],
    "tools": [WEATHER],
}
CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [message("user", "Say hello in exactly 3 words.")]},
    "system-prompt": {
        "input": [
            message("system", "You are a pirate. Always respond in pirate speak."),
            message("user", "Say hello."),
        ]
    },
    "tool-calling": ASKED_FOR_WEATHER,
    "image-input": {
        "input": [
            message(
                "user",
                [
                    {"type": "input_text", "text": "What do you see in this image?"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
                ],
            )
        ]
    },
    "multi-turn": {
        "input": [
            message("user", "My name is Alice."),
            message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
            message("user", "What is my name?"),
        ]
    },
    "reasoning": {"input": "Think of two.", "reasoning": {"summary": "auto"}},
}
"""By the names of the published cases, which stream two of them; the last one is our own."""
EVENTS = {
    "response.created": "ResponseCreatedStreamingEvent",
    "response.in_progress": "ResponseInProgressStreamingEvent",
    "response.completed": "ResponseCompletedStreamingEvent",
    "response.output_item.added": "ResponseOutputItemAddedStreamingEvent",
    "response.output_item.done": "ResponseOutputItemDoneStreamingEvent",
    "response.content_part.added": "ResponseContentPartAddedStreamingEvent",
    "response.content_part.done": "ResponseContentPartDoneStreamingEvent",
    "response.output_text.delta": "ResponseOutputTextDeltaStreamingEvent",
    "response.output_text.done": "ResponseOutputTextDoneStreamingEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaStreamingEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneStreamingEvent",
    "response.reasoning_summary_part.added": "ResponseReasoningSummaryPartAddedStreamingEvent",
    "response.reasoning_summary_part.done": "ResponseReasoningSummaryPartDoneStreamingEvent",
    "response.reasoning_summary_text.delta": "ResponseReasoningSummaryDeltaStreamingEvent",
    "response.reasoning_summary_text.done": "ResponseReasoningSummaryDoneStreamingEvent",
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that follows the script; its chat template has tools and reasoning."""
    directory = tmp_path_factory.mktemp("scripted")
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    options = ("--synthetic-script", str(script), "--reasoning-parser", "think")
    with Server(*SYNTHETIC, *options, directory=directory) as running:
        yield running


def expected_items(name: str) -> list[str]:
    if name == "tool-calling":
        return ["function_call"]
    return ["reasoning", "message"] if name == "reasoning" else ["message"]


@pytest.mark.parametrize("name", CASES)
def test_whole_responses(scripted: Server, name: str) -> None:
    reply = scripted.post("/v1/responses", {"model": "m", **CASES[name]})
    assert reply.status_code == 200, reply.text
    response = reply.json()
    specification.ResponseResource.model_validate(response)
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == expected_items(name)
    assert ("Warning" in reply.headers) == (name == "image-input")


@pytest.mark.parametrize("name", CASES)
def test_streamed_responses(scripted: Server, name: str) -> None:
    reply = scripted.post("/v1/responses", {"model": "m", "stream": True, **CASES[name]})
    assert reply.status_code == 200, reply.text
    events = events_of(reply.text)
    for event in events:
        getattr(specification, EVENTS[event["type"]]).model_validate(event)
    response = final_response(events)
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == expected_items(name)
    seen = {event["type"] for event in events}
    text = "function_call_arguments" if name == "tool-calling" else "output_text"
    assert {f"response.{text}.delta", f"response.{text}.done"} <= seen


def test_a_round_with_a_tool(scripted: Server) -> None:
    first = scripted.post("/v1/responses", {"model": "m", **ASKED_FOR_WEATHER}).json()
    [call] = first["output"]
    assert json.loads(call["arguments"]) == {"location": "San Francisco, CA"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 °C"}
    history = [*ASKED_FOR_WEATHER["input"], call, result]
    second = scripted.post("/v1/responses", {"model": "m", "input": history, "tools": [WEATHER]}).json()
    assert second["output"][0]["content"][0]["text"] == "It is 18 °C in San Francisco."


def test_stored_responses_are_the_final_ones(scripted: Server) -> None:
    whole = scripted.post("/v1/responses", {"input": "Hi."}).json()
    events = events_of(scripted.post("/v1/responses", {"input": "Think.", "stream": True}).text)
    for response in (whole, final_response(events)):
        assert response["store"]
        assert scripted.get(f"/v1/responses/{response['id']}").json() == response
    dropped = scripted.post("/v1/responses", {"input": "Hi.", "store": False}).json()
    assert not dropped["store"]
    assert scripted.get(f"/v1/responses/{dropped['id']}").status_code == 404


def test_a_conversation_goes_on_from_the_store(scripted: Server) -> None:
    first = scripted.post("/v1/responses", {"model": "m", **ASKED_FOR_WEATHER}).json()
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "18 °C"}
    fields = {"previous_response_id": first["id"], "input": [result], "tools": [WEATHER]}
    second = scripted.post("/v1/responses", fields).json()
    assert second["output"][0]["content"][0]["text"] == "It is 18 °C in San Francisco."
    assert second["previous_response_id"] == first["id"]
    counted = scripted.post("/v1/responses/input_tokens", fields).json()
    assert counted["input_tokens"] == second["usage"]["input_tokens"]
    referred = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    fields = {"input": [*ASKED_FOR_WEATHER["input"], *referred, result], "tools": [WEATHER]}
    third = scripted.post("/v1/responses", fields).json()
    assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def test_a_response_in_the_background(scripted: Server) -> None:
    queued = scripted.post("/v1/responses", {"input": "Hi.", "background": True}).json()
    assert queued["status"] in ("queued", "in_progress", "completed")
    stream = scripted.get(f"/v1/responses/{queued['id']}?stream=true")
    events = events_of(stream.text)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1]["response"] == scripted.get(f"/v1/responses/{queued['id']}").json()
    assert events[-1]["response"]["status"] == "completed"


def test_a_failure_ends_the_events(scripted: Server) -> None:
    reply = scripted.post("/v1/responses", {"input": "Fail.", "stream": True})
    assert reply.status_code == 200
    events = events_of(reply.text)
    specification.ResponseFailedStreamingEvent.model_validate(events[-1])
    failed = final_response(events)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["content"][0]["text"]
    assert scripted.get(f"/v1/responses/{failed['id']}").json() == failed


def test_openais_client_reads_all_of_it(scripted: Server) -> None:
    tools: Any = [WEATHER, {"type": "custom", "name": "patch"}]
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        for text, kinds in (
            ("Think of two.", ["reasoning", "message"]),
            ("What is the weather?", ["function_call"]),
            ("Patch it.", ["custom_tool_call"]),
        ):
            with client.responses.stream(model="m", input=text, tools=tools) as stream:
                for _ in stream:
                    pass
                streamed = stream.get_final_response()
            assert [item.type for item in streamed.output] == kinds
            stored = client.responses.retrieve(streamed.id)
            assert [item.id for item in stored.output] == [item.id for item in streamed.output]
            assert stored.output_text == streamed.output_text
        whole = client.responses.create(model="m", input="Patch it.", tools=tools)
        assert whole.output[0].type == "custom_tool_call"
        assert whole.output[0].input == "*** Begin\n"


def test_errors_name_the_field(scripted: Server) -> None:
    reply = scripted.post("/v1/responses", {"input": [message("robot", "Hi.")]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "input[0].role"
    assert "user, assistant, system, developer" in error["message"]
