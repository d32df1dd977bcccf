"""What each API makes of its pictures for a model that sees them: their places, sources and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.gemini.dialect import Gemini, GeminiTokenCounter
from penstock.dialects.messages.dialect import Messages
from penstock.dialects.ollama.dialect import OllamaChat, OllamaGenerate
from penstock.dialects.openai_reply import usage_field, whole_usage_field
from penstock.dialects.responses.dialect import Responses
from penstock.dialects.tokens.render import Render
from penstock.generation.dialect import RequestInfo
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.replies.reply import Prompt
from penstock.generation.replies.token_usage import TokenUsage
from penstock.generation.request.unsupported_content import IMAGE_FOLLOWS
from penstock.http.errors import ApiError
from penstock.wire.media.items import MediaItem
from penstock.wire.media.worker import MediaDescription
from tests.generation.planning import tiny_input_processor

TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' and message.role == 'user' %}<image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}
{% endfor %}"""
DATA = "iVBORw0KGgoA"
URL = f"data:image/png;base64,{DATA}"
WEB = "https://example.org/a.png"
Plan = Callable[[Any], RequestPlan]


@cache
def apis(**options: Any) -> dict[str, Plan]:
    """How each API plans the value of its field of messages."""
    config = ServeConfig(**options)
    processor = tiny_input_processor(
        config, ChatTemplate({"default": TEMPLATE}, {}), names=("m",), media=MediaDescription("<image>")
    )
    chat, messages = ChatCompletions(config, processor), Messages(config, processor)
    responses, gemini = Responses(config, processor, None), Gemini(config, processor)
    ollama, generate = OllamaChat(config, processor), OllamaGenerate(config, processor)

    def plan(dialect: Any, field: str, **more: Any) -> Plan:
        info = RequestInfo(path="/v1beta/models/m:generateContent")
        return lambda value: dialect.plan(json.dumps({field: value, **more}).encode(), info)

    return {
        "chat": plan(chat, "messages"),
        "messages": plan(messages, "messages", max_tokens=9),
        "responses": plan(responses, "input"),
        "gemini": plan(gemini, "contents"),
        "ollama": plan(ollama, "messages"),
        "generate": plan(generate, "images", prompt="Look"),
        "count": lambda value: RequestPlan(
            model="",
            prompts=[
                GeminiTokenCounter(processor)
                .prompt(
                    json.dumps({"contents": value}).encode(), RequestInfo(path="/v1beta/models/m:c"), None
                )
                .prompt
            ],
            add_special_tokens=False,
            base=None,  # type: ignore[arg-type]
            max_model_len=1,
        ),
    }


def user(*parts: Any) -> list[Any]:
    return [
        {"role": "user", "content": [{"type": "text", "text": "A"}, *parts, {"type": "text", "text": "B"}]}
    ]


def turn(*parts: Any) -> list[Any]:
    return [{"role": "user", "parts": [{"text": "A"}, *parts, {"text": "B"}]}]


def item(*parts: Any) -> list[Any]:
    texts = [{"type": "input_text", "text": text} for text in "AB"]
    return [{"role": "user", "content": [texts[0], *parts, texts[1]]}]


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", **fields}


PLACE = "messages[0].content[1]"
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("chat", user(chat(image_url={"url": URL, "detail": "low"})), f"{PLACE}.image_url.url", URL, "low"),
    # As Qwen's examples write it, and other clients that do not know better.
    *(
        ("chat", user(chat(image_url=url)), f"{PLACE}.image_url", url, "auto")
        for kind in ("image", "image/*", "image/bmp", "application/octet-stream")
        for url in [f"data:{kind};base64,{DATA}"]
    ),
    ("chat", user(chat(image_url=WEB, uuid="u")), f"{PLACE}.image_url", WEB, "auto"),
    (
        "chat",
        user({"type": "input_image", "image_url": URL, "detail": "high"}),
        f"{PLACE}.image_url",
        URL,
        "high",
    ),
    ("chat", user({"type": "image", "image": URL}), f"{PLACE}.image", URL, "auto"),
    ("chat", user({"type": "image", "url": WEB}), f"{PLACE}.url", WEB, "auto"),
    (
        "messages",
        user(source(type="base64", media_type="image/png", data=DATA)),
        f"{PLACE}.source.data",
        URL,
        "auto",
    ),
    ("messages", user(source(type="url", url=WEB)), f"{PLACE}.source.url", WEB, "auto"),
    (
        "messages",
        user({"type": "document", "source": {"type": "content", "content": [source(type="url", url=WEB)]}}),
        f"{PLACE}.source.content[0].source.url",
        WEB,
        "auto",
    ),
    (
        "responses",
        item({"type": "input_image", "image_url": URL, "detail": "original"}),
        "input[0].content[1].image_url",
        URL,
        "original",
    ),
    (
        "gemini",
        turn({"inlineData": {"mimeType": "image/png", "data": DATA}}),
        "contents[0].parts[1].inlineData.data",
        URL,
        "auto",
    ),
    (
        "gemini",
        turn({"inline_data": {"mime_type": "image/png", "data": DATA}}),
        "contents[0].parts[1].inlineData.data",
        URL,
        "auto",
    ),
    (
        "gemini",
        turn({"fileData": {"mimeType": "image/png", "fileUri": WEB}}),
        "contents[0].parts[1].fileData.fileUri",
        WEB,
        "auto",
    ),
    (
        "ollama",
        [{"role": "user", "content": "AB", "images": [DATA]}],
        "messages[0].images[0]",
        f"data:;base64,{DATA}",
        "auto",
    ),
    ("generate", [DATA], "images[0]", f"data:;base64,{DATA}", "auto"),
    ("responses", item(chat(image_url={"url": URL})), "input[0].content[1].image_url.url", URL, "auto"),
    (
        "gemini",
        turn({"inlineData": {"data": "-_AA"}}),
        "contents[0].parts[1].inlineData.data",
        "data:;base64,-_AA",
        "auto",
    ),
]


@pytest.mark.parametrize(("api", "value", "field", "url", "detail"), SEEN)
def test_a_picture_is_where_it_was_sent(api: str, value: Any, field: str, url: str, detail: str) -> None:
    plan = apis()[api](value)
    assert [(each.field, each.url, each.detail) for each in plan.images] == [(field, url, detail)]
    assert plan.warning is None
    [prompt] = plan.prompts
    assert isinstance(prompt, str)
    assert prompt.count("<image>") == 1
    if api in ("chat", "responses", "gemini"):
        assert "A<image>B" in prompt


CALL = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
IMAGE = chat(image_url=URL)
BLOCK = source(type="base64", media_type="image/png", data=DATA)
OF_TOOLS: list[tuple[str, Any, list[str]]] = [
    (
        "chat",
        [
            {"role": "user", "content": [IMAGE]},
            {"role": "assistant", "tool_calls": [CALL, CALL | {"id": "d"}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "one"}, IMAGE]},
            {"role": "tool", "tool_call_id": "d", "content": [IMAGE]},
            {"role": "user", "content": ["Well?", IMAGE]},
        ],
        [
            "messages[0].content[0]",
            "messages[2].content[1]",
            "messages[3].content[0]",
            "messages[4].content[1]",
        ],
    ),
    (
        "messages",
        [
            {"role": "user", "content": [BLOCK]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": each, "name": "view", "input": {}} for each in "cd"],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "one"}, BLOCK],
                    },
                    {"type": "tool_result", "tool_use_id": "d", "content": [BLOCK]},
                    {"type": "text", "text": "Well?"},
                    BLOCK,
                ],
            },
        ],
        [
            "messages[0].content[0].source",
            "messages[2].content[0].content[1].source",
            "messages[2].content[1].content[0].source",
            "messages[2].content[3].source",
        ],
    ),
    (
        "responses",
        [
            {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
            {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
            {"type": "computer_call", "call_id": "d", "actions": []},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "one"}, {"type": "input_image", "image_url": URL}],
            },
            {
                "type": "computer_call_output",
                "call_id": "d",
                "output": {"type": "computer_screenshot", "image_url": URL},
            },
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Well?"},
                    {"type": "input_image", "image_url": URL},
                ],
            },
        ],
        ["input[0].content[0].", "input[3].output[1].", "input[4].output.", "input[5].content[1]."],
    ),
    (
        "gemini",
        [
            {"parts": [{"inlineData": {"mimeType": "image/png", "data": DATA}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "view"}}]},
            {
                "parts": [
                    {
                        "functionResponse": {
                            "name": "view",
                            "response": {"output": "one"},
                            "parts": [{"inlineData": {"mimeType": "image/png", "data": DATA}}],
                        }
                    },
                    {"text": "Well?"},
                    {"inlineData": {"mimeType": "image/png", "data": DATA}},
                ],
            },
        ],
        ["contents[0].parts[0].", "contents[2].parts[0].functionResponse.parts[0].", "contents[2].parts[2]."],
    ),
]


@pytest.mark.parametrize(("api", "value", "fields"), OF_TOOLS)
def test_pictures_of_tools_follow_in_the_order_of_the_conversation(
    api: str, value: Any, fields: list[str]
) -> None:
    plan = apis()[api](value)
    starts = [each.field[: len(field)] for each, field in zip(plan.images, fields, strict=True)]
    assert starts == fields
    prompt = str(plan.prompts[0])
    results = len(fields) - 2
    assert prompt.count(IMAGE_FOLLOWS) == results
    assert f"<user>{'<image>' * results}Well?<image>" in prompt
    assert "one" in prompt


def test_a_screenshot_at_the_end_is_shown_after_its_result() -> None:
    plan = apis()["chat"](OF_TOOLS[0][1][:3])
    assert str(plan.prompts[0]).endswith(f"one{IMAGE_FOLLOWS}<user><image>")


REFUSED: list[tuple[str, Any, str, str]] = [
    ("chat", user(chat()), f"{PLACE}.image_url", "missing"),
    ("chat", user(chat(uuid="u")), f"{PLACE}.image_url", "uuid"),
    ("chat", user(chat(image_url={"url": "", "detail": "low"})), f"{PLACE}.image_url.url", "data: URL"),
    ("chat", user(chat(image_url={"url": DATA})), f"{PLACE}.image_url.url", DATA),
    ("chat", user(chat(image_url={"url": 5})), f"{PLACE}.image_url.url", "value=5"),
    ("chat", user(chat(image_url={"url": URL, "detail": "tiny"})), f"{PLACE}.image_url.detail", "tiny"),
    ("chat", user(chat(image_url="data:image/png,abc")), f"{PLACE}.image_url", "base64"),
    ("chat", user(chat(image_url="data:image/svg+xml;base64,AAAA")), f"{PLACE}.image_url", "image/svg+xml"),
    ("chat", user(chat(image_url="data:text/plain;base64,AAAA")), f"{PLACE}.image_url", "text/plain"),
    ("chat", user(chat(image_url="data:image/png;base64,")), f"{PLACE}.image_url", "base64"),
    ("chat", user(chat(image_url="data:image/png;base64,<svg>")), f"{PLACE}.image_url", "<svg>"),
    ("chat", user(chat(image_url="ftp://a/b")), f"{PLACE}.image_url", "value=ftp://)"),
    ("chat", user({"type": "image_embeds", "image_embeds": "x"}), f"{PLACE}.type", "image_embeds"),
    ("messages", user(source(type="file", file_id="f")), f"{PLACE}.source.type", "base64 or url"),
    ("messages", user(source(type="gopher")), f"{PLACE}.source.type", "gopher"),
    ("messages", user({"type": "image"}), f"{PLACE}.source.type", "base64 or url"),
    ("messages", user(source(type="base64", data=DATA)), f"{PLACE}.source.media_type", "image/png"),
    (
        "messages",
        user(source(type="base64", media_type="text/html", data=DATA)),
        f"{PLACE}.source.media_type",
        "text/html",
    ),
    (
        "messages",
        user(source(type="base64", media_type="image/png", data="")),
        f"{PLACE}.source.data",
        "base64",
    ),
    ("messages", user(source(type="base64", media_type="image/png")), f"{PLACE}.source.data", "base64"),
    ("messages", user(source(type="url")), f"{PLACE}.source.url", "https:"),
    ("responses", item({"type": "input_image", "file_id": "f"}), "input[0].content[1].file_id", "image_url"),
    ("responses", item({"type": "input_image"}), "input[0].content[1].image_url", "https:"),
    (
        "gemini",
        turn({"inlineData": {"mimeType": "image/png"}}),
        "contents[0].parts[1].inlineData.data",
        "base64",
    ),
    (
        "gemini",
        turn({"fileData": {"mimeType": "image/png", "fileUri": "gs://a/b"}}),
        "contents[0].parts[1].fileData.fileUri",
        "gs://a/b",
    ),
    ("ollama", [{"role": "user", "images": ["?"]}], "messages[0].images[0]", "'?'"),
    ("generate", ["https://a/b.png"], "images[0]", "https://a/b.png"),
]


@pytest.mark.parametrize(("api", "value", "field", "said"), REFUSED)
def test_a_bad_picture_is_named(api: str, value: Any, field: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        apis()[api](value)
    assert (caught.value.status, caught.value.param) == (400, field)
    assert said in caught.value.message
    assert field in caught.value.message


def test_the_limit_of_a_request() -> None:
    plan = apis(limit_mm_per_prompt='{"image": 2}')["chat"]
    assert len(plan(user(IMAGE, IMAGE)).images) == 2
    with pytest.raises(ApiError, match="at most 2 images") as caught:
        plan(user(IMAGE, IMAGE, IMAGE))
    assert caught.value.param == "messages[0].content[3].image_url"


def test_a_model_with_vision_reads_what_it_cannot_see() -> None:
    plan = apis()["chat"](user(IMAGE, {"type": "file", "file": {}}))
    assert "[A document was sent here. This model reads text and images only and cannot see it.]" in str(
        plan.prompts
    )
    assert plan.warning == (
        "messages: the model reads text and images only and cannot see documents; "
        "it was told so in their place"
    )
    assert len(plan.images) == 1


def test_a_generated_picture_follows_the_answer() -> None:
    shown = {"type": "image_generation_call", "id": "ig", "result": DATA}
    plan = apis()["responses"]([*item(), shown, {"role": "user", "content": "Go on."}])
    assert str(plan.prompts[0]).endswith(f"<assistant>{IMAGE_FOLLOWS}<user><image>Go on.")
    assert plan.images[0].field == "input[1].result"


def test_a_counted_prompt_has_its_pictures() -> None:
    assert "A<image>B" in str(
        apis()["count"](turn({"inlineData": {"mimeType": "image/png", "data": DATA}})).prompts
    )


def test_pictures_count_where_a_conversation_is_shortened() -> None:
    config, media = ServeConfig(), MediaDescription("<image>")
    processor = tiny_input_processor(
        config, ChatTemplate({"default": TEMPLATE}, {}), media=media, picture_tokens=lambda: 500
    )
    shown = [{"type": "input_image", "image_url": f"{WEB}?{number}"} for number in range(8)]
    items = [each for picture in shown for each in item(picture)]
    sent = json.dumps({"input": items, "truncation": "auto", "max_output_tokens": 40}).encode()
    plan = Responses(config, processor, None).plan(sent, RequestInfo())
    assert [each.url[-1] for each in plan.images] == ["5", "6", "7"]
    assert processor.count_tokens(str(plan.prompts[0]), most=2008) in range(1500, 2009)
    assert processor.count_tokens("<image> " * 3, most=1000) > 1000


def test_texts_that_look_like_pictures_are_none() -> None:
    plan = apis()["chat"](user(IMAGE, "<image>"))
    assert len(plan.images) == 1
    assert str(plan.prompts[0]).count("<image>") == 1


def test_render_routes_refuse_pictures() -> None:
    processor = tiny_input_processor(
        template=ChatTemplate({"default": TEMPLATE}, {}), media=MediaDescription("<image>")
    )
    render = Render(ChatCompletions(ServeConfig(), processor))
    with pytest.raises(ApiError, match="no images; send the conversation to /v1/chat/completions") as caught:
        render.plan(json.dumps({"messages": user(IMAGE)}).encode())
    assert caught.value.param == f"{PLACE}.image_url"


def test_usage_has_the_tokens_of_pictures() -> None:
    usage = TokenUsage(9, 2, 3, image_tokens=4)
    assert usage_field(usage)["prompt_tokens_details"] == {"cached_tokens": 3, "image_tokens": 4}
    assert whole_usage_field(usage)["prompt_tokens_details"]["multimodal_tokens"] == {"image": 4}
    assert "image_tokens" not in usage_field(TokenUsage(9, 2, 3))["prompt_tokens_details"]
    assert usage.plus(usage).image_tokens == 8
    prompt = Prompt(b"", 9, media=(MediaItem(b"k" * 16, 1, 4, 1), MediaItem(b"l" * 16, 6, 2, 1)))
    assert prompt.image_tokens == 6
