"""Plans and replies of Gemini's API, without an engine and without a connection."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from penstock.api.route_patterns import RoutePatterns
from penstock.config.serve import ServeConfig
from penstock.dialects.gemini.conversation import json_schema
from penstock.dialects.gemini.dialect import Gemini, GeminiModels, GeminiStream, GeminiTokenCounter
from penstock.generation.dialect import AskedModels, RequestInfo
from penstock.generation.plan import RequestPlan
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.dialects.messages.serving import processor, tables, tokens_of
from tests.generation.replying import PROMPT, Desk, in_loop

INFO = RequestInfo(path="/v1beta/models/m:generateContent", target=b"/v1beta/models/m:x?alt=sse")
ARRAY = INFO._replace(target=b"/v1beta/models/m:x")
TOOL = {
    "functionDeclarations": [
        {
            "name": "weather",
            "parameters": {
                "type": "OBJECT",
                "properties": {"city": {"type": "STRING", "nullable": True}, "days": {"type": "ARRAY"}},
            },
        }
    ]
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TEXT = f"<think>Well.</think>I ask. {CALL % 'Oslo'}\n{CALL % 'Rome'}"


@cache
def dialect(*, stream: bool = False, strict: bool = False) -> Gemini:
    config = ServeConfig(strict_requests=strict)
    return (GeminiStream if stream else Gemini)(config, processor(strict_requests=strict))


def plan(*, stream: bool = False, info: RequestInfo = INFO, **fields: Any) -> RequestPlan:
    asked = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], **fields}
    return dialect(stream=stream).plan(json.dumps(asked).encode(), info)


def config(**fields: Any) -> RequestPlan:
    return plan(generationConfig=fields)


def refusal(**fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    error = json.loads(dialect().error_body(caught.value, "r"))["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    return str(error["message"])


def streamed(made: RequestPlan, parts: list[str]) -> bytes:
    data: list[bytes] = []

    def run() -> None:
        desk = Desk(tables())
        _, sink = desk.streamed(made, format=dialect(stream=True).reply_format(made, "r"))
        for index in range(made.n):
            desk.deliver(desk.rows(index, [tokens_of(part) for part in parts], FinishReason.GRAMMAR))
        assert sink.ended == "finish"
        data.append(bytes(sink.data))

    in_loop(run)
    return data[0]


def events(data: bytes) -> list[Any]:
    return [json.loads(block.removeprefix(b"data: ")) for block in data.split(b"\n\n") if block]


def parts_of(chunks: list[Any]) -> list[Any]:
    return [part for each in chunks for part in each["candidates"][0]["content"]["parts"]]


def whole(made: RequestPlan, text: str) -> Any:
    bodies: list[Any] = []

    def run() -> None:
        desk = Desk(tables())
        reply = desk.collected(made, format=dialect().reply_format(made, "r"))
        desk.deliver(desk.rows(0, [tokens_of(text)], FinishReason.LENGTH))
        bodies.append(json.loads(b"".join(reply.format.whole(reply))))

    in_loop(run)
    return bodies[0]


@pytest.mark.parametrize("info", [INFO, ARRAY])
def test_a_stream_of_events_or_an_array(info: RequestInfo) -> None:
    data = streamed(plan(stream=True, info=info), ["def main", "(): ", "pass"])
    chunks = events(data) if info is INFO else json.loads(data)
    assert "".join(part["text"] for part in parts_of(chunks)) == "def main(): pass"
    *pieces, last = chunks
    assert all("finishReason" not in each["candidates"][0] for each in pieces)
    assert last["candidates"][0]["finishReason"] == "STOP"
    count = len(tokens_of("def main(): pass"))
    assert last["usageMetadata"] == {
        "promptTokenCount": PROMPT.length,
        "candidatesTokenCount": count,
        "totalTokenCount": PROMPT.length + count,
    }
    assert (last["modelVersion"], last["responseId"]) == ("m", "r")


@pytest.mark.parametrize("thoughts", [True, False])
def test_calls_and_reasoning(thoughts: bool) -> None:
    options: Any = {"tools": [TOOL], "generationConfig": {"thinkingConfig": {"includeThoughts": thoughts}}}
    data = streamed(plan(stream=True, **options), [TEXT[at : at + 7] for at in range(0, len(TEXT), 7)])
    for parts in (parts_of(events(data)), parts_of([whole(plan(**options), TEXT)])):
        assert "".join(part["text"] for part in parts if part.get("thought")) == ("Well." * thoughts)
        said = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        assert said.strip() == "I ask."
        calls = [part for part in parts if "functionCall" in part]
        assert [call["functionCall"]["args"] for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
        assert ["thoughtSignature" in call for call in calls] == [True, False]
        sent = [part for part in parts if not part.get("thought")]
        contents = [
            {"role": "user", "parts": [{"text": "Where?"}]},
            {"role": "model", "parts": sent},
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"name": "weather", "response": {"output": "rain"}}},
                    {"functionResponse": {"name": "weather", "response": {"error": "none"}}},
                    {"text": "Well?"},
                    {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
                ],
            },
        ]
        made = plan(contents=contents, tools=[TOOL], systemInstruction={"parts": [{"text": "Be kind."}]})
        [prompt] = made.prompts
        assert isinstance(prompt, str)
        for text in (
            "Be kind.",
            "<think>Well.</think>I ask.",
            "\nrain<",
            '{"error":"none"}',
            "cannot see it",
        ):
            assert text in prompt
        assert '"type": ["string", "null"]' in prompt
        assert made.warning is not None


def test_several_candidates() -> None:
    made = plan(stream=True, info=ARRAY, generationConfig={"candidateCount": 2, "temperature": 1})
    chunks = json.loads(streamed(made, ["a", "b"]))
    for index in (0, 1):
        own = [each for chunk in chunks for each in chunk["candidates"] if each["index"] == index]
        assert "".join(part["text"] for each in own for part in each["content"]["parts"]) == "ab"
        assert own[-1]["finishReason"] == "STOP"


@pytest.mark.parametrize("info", [INFO, ARRAY])
def test_a_failure_is_not_in_an_event(info: RequestInfo) -> None:
    def run() -> None:
        desk, made = Desk(tables()), plan(stream=True, info=info)
        _, sink = desk.streamed(made, format=dialect(stream=True).reply_format(made, "r"))
        desk.deliver(desk.rows(0, [tokens_of("def")]))
        desk.streams.fail(0, 0, StreamError(503, "engine_died", "The engine is gone."))
        data = bytes(sink.data)
        last = json.loads(data.strip().split(b"\n")[-1]) if info is INFO else json.loads(data)[-1]
        assert last["error"] == {"code": 503, "message": "The engine is gone.", "status": "UNAVAILABLE"}

    in_loop(run)


def test_the_configuration_is_sampling_parameters() -> None:
    made = config(
        temperature=0.5,
        topP=0.9,
        topK=40.0,
        maxOutputTokens=9,
        seed=3,
        stopSequences=["a", "b", "c", "d", "e"],
        presencePenalty=0.5,
        frequencyPenalty=0.25,
        responseLogprobs=True,
        logprobs=2,
    )
    base = made.base
    assert (base.max_tokens, base.temperature, base.top_k, base.top_p, base.seed) == (9, 0.5, 40, 0.9, 3)
    assert (base.presence_penalty, base.frequency_penalty, len(made.stop), made.logprobs) == (0.5, 0.25, 5, 2)
    assert config(maxOutputTokens=1 << 20).base.max_tokens == 2048
    snake = b'{"contents":[{"parts":[{"text":"Hi"}]}],"generation_config":{"max_output_tokens":5}}'
    assert dialect().plan(snake, INFO).base.max_tokens == 5
    assert not config().stream
    assert plan(stream=True).stream


def test_thinking() -> None:
    assert "<think>\n\n</think>" in str(config(thinkingConfig={"thinkingBudget": 0}).prompts[0])
    assert "<think>" not in str(config(thinkingConfig={"thinkingBudget": -1}).prompts[0])
    assert "<think>" not in str(config(thinkingConfig={"thinkingLevel": "HIGH"}).prompts[0])


def test_structured_output() -> None:
    schema = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "propertyOrdering": ["a"]}
    for fields in (
        {"responseMimeType": "application/json"},
        {"responseMimeType": "application/json", "responseSchema": schema},
        {"responseJsonSchema": {"type": "object"}},
        {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b"]}},
    ):
        assert config(**fields).constraint is not None
    assert config(responseMimeType="text/plain").constraint is None


def test_schemas_in_googles_spelling() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "format": "enum", "enum": ["a"], "nullable": True},
            "list": {"type": "ARRAY", "items": {"anyOf": [{"type": "NUMBER"}]}, "minItems": "2"},
        },
        "example": {},
    }
    assert json_schema(given) == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["a"]},
            "list": {"type": "array", "items": {"anyOf": [{"type": "number"}]}, "minItems": 2},
        },
    }


@pytest.mark.parametrize(
    ("mode", "names", "forced"), [("AUTO", None, False), ("ANY", None, True), ("ANY", ["weather"], True)]
)
def test_functions_are_chosen(mode: str, names: list[str] | None, forced: bool) -> None:
    calling = {"mode": mode, "allowedFunctionNames": names}
    made = plan(tools=[TOOL], toolConfig={"functionCallingConfig": calling})
    assert (made.constraint is not None and not made.constraint.optional) == forced
    none = plan(tools=[TOOL], toolConfig={"functionCallingConfig": {"mode": "NONE"}})
    assert none.constraint is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"contents": []}, "contents must have"),
        ({"contents": [{"role": "robot"}]}, "contents[0].role must be"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, "contents[0].parts[0] is not supported"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch is not supported"),
        ({"cachedContent": "x"}, "cachedContent is not supported"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}}, "functionCallingConfig.mode must be"),
        ({"generationConfig": {"topP": 7}}, "generationConfig.topP must be"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"candidateCount": 3, "temperature": 0}}, "must be 1 when using greedy"),
        ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences cannot"),
        (
            {"generationConfig": {"responseModalities": ["IMAGE"]}},
            "responseModalities is not",
        ),
        ({"generationConfig": {"responseMimeType": "text/csv"}}, "responseMimeType must be"),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "MAX"}}}, "thinkingLevel must be"),
    ],
)
def test_errors_name_fields_as_gemini_does(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(**fields)


def test_counting_and_models() -> None:
    counter = GeminiTokenCounter(processor())
    asked = {"contents": [{"parts": [{"text": "Hi"}]}]}
    for body in (asked, {"generateContentRequest": {**asked, "model": "models/m"}}):
        counted = counter.prompt(json.dumps(body).encode(), INFO, None)
        assert counted.prompt == plan().prompts[0]
    assert counter.reply(3) == b'{"totalTokens":3}'
    card = {"id": "m", "created": 1, "max_model_len": 2048}
    asked_for = AskedModels({"m": card}, lambda name: {"m": card}[name], path="/v1beta/models/m")
    [listed] = json.loads(GeminiModels("/v1beta/models").reply(asked_for))["models"]
    assert listed == json.loads(GeminiModels("/v1beta/models/{model}").reply(asked_for))
    assert (listed["name"], listed["inputTokenLimit"]) == ("models/m", 2048)


def test_routes_have_a_model_in_their_path() -> None:
    patterns = RoutePatterns([Gemini.path, GeminiStream.path, "/v1beta/models/{model}", "/health"])
    assert patterns.route_of("/v1beta/models/org/a:8b:generateContent") == Gemini.path
    assert patterns.route_of("/v1/models/m:streamGenerateContent") == GeminiStream.path
    assert patterns.route_of("/v1beta/models/m") == "/v1beta/models/{model}"
    for path in ("/v1/models/m", "/v1beta/models/", "/health", "/v1beta/models"):
        assert patterns.route_of(path) == path
