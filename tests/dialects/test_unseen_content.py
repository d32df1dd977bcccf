"""What models cannot see is treated alike by the three APIs of conversations, wherever it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.generation.plan import RequestPlan
from penstock.generation.request.unsupported_content import placeholder
from penstock.http.errors import ApiError
from tests.dialects.messages import serving
from tests.dialects.responses.test_plans import make_dialect
from tests.generation.planning import planners

DATA = "QUJDREVG"
URL = f"data:image/png;base64,{DATA}"

# As the openai and anthropic packages spell them.
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
CHAT_AUDIO = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
CHAT_VIDEO = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{DATA}"}}
CHAT_FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": DATA}}
ITEM_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
ITEM_IMAGE_FILE = {"type": "input_image", "file_id": "file-1", "detail": "auto"}
ITEM_FILE = {"type": "input_file", "filename": "a.pdf", "file_data": DATA}
ITEM_AUDIO = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
BLOCK_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
BLOCK_IMAGE_URL = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
BLOCK_IMAGE_FILE = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
BLOCK_PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": DATA},
    "title": "T",
}
BLOCK_PDF_URL = {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}
BLOCK_PAGES = {"type": "document", "source": {"type": "content", "content": [BLOCK_IMAGE]}}

Conversation = list[dict[str, Any]]


def chat_user(part: dict[str, Any]) -> Conversation:
    return [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}]


def chat_tool(part: dict[str, Any]) -> Conversation:
    call = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [part]},
    ]


def item_user(part: dict[str, Any]) -> Conversation:
    return [{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, part]}]


def item_tool(part: dict[str, Any]) -> Conversation:
    return [
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ]


def item_custom(part: dict[str, Any]) -> Conversation:
    return [
        {"type": "custom_tool_call", "call_id": "c", "name": "view", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [part]},
    ]


def item_computer(part: dict[str, Any]) -> Conversation:
    call = {"type": "computer_call", "call_id": "c", "id": "cu_1", "status": "completed"}
    return [
        {**call, "actions": [{"type": "screenshot"}], "pending_safety_checks": []},
        {"type": "computer_call_output", "call_id": "c", "output": part, "acknowledged_safety_checks": []},
    ]


def item_generated(part: dict[str, Any]) -> Conversation:
    return [part, {"role": "user", "content": "Go on."}]


def block_user(block: dict[str, Any]) -> Conversation:
    return [{"role": "user", "content": [{"type": "text", "text": "Look:"}, block]}]


def block_tool(block: dict[str, Any]) -> Conversation:
    call = {"type": "tool_use", "id": "c", "name": "view", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


CASES = [
    ("chat", chat_user, CHAT_IMAGE, "image", "messages[0].content[1]"),
    ("chat", chat_user, CHAT_AUDIO, "recording", "messages[0].content[1]"),
    ("chat", chat_user, CHAT_VIDEO, "video", "messages[0].content[1]"),
    ("chat", chat_user, CHAT_FILE, "document", "messages[0].content[1]"),
    ("chat", chat_tool, CHAT_IMAGE, "image", "messages[2].content[0]"),
    ("chat", chat_tool, CHAT_FILE, "document", "messages[2].content[0]"),
    ("responses", item_user, ITEM_IMAGE, "image", "input[0].content[1]"),
    ("responses", item_user, ITEM_IMAGE_FILE, "image", "input[0].content[1]"),
    ("responses", item_user, ITEM_FILE, "document", "input[0].content[1]"),
    ("responses", item_user, ITEM_AUDIO, "recording", "input[0].content[1]"),
    ("responses", item_tool, ITEM_IMAGE, "image", "input[1].output[0]"),
    ("responses", item_tool, ITEM_FILE, "document", "input[1].output[0]"),
    ("responses", item_custom, ITEM_IMAGE, "image", "input[1].output[0]"),
    (
        "responses",
        item_computer,
        {"type": "computer_screenshot", "image_url": URL},
        "image",
        "input[1].output",
    ),
    (
        "responses",
        item_generated,
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": DATA},
        "image",
        "input[0]",
    ),
    ("messages", block_user, BLOCK_IMAGE, "image", "messages[0].content[1]"),
    ("messages", block_user, BLOCK_IMAGE_URL, "image", "messages[0].content[1]"),
    ("messages", block_user, BLOCK_IMAGE_FILE, "image", "messages[0].content[1]"),
    ("messages", block_user, BLOCK_PDF, "document", "messages[0].content[1].source"),
    ("messages", block_user, BLOCK_PDF_URL, "document", "messages[0].content[1].source"),
    ("messages", block_user, BLOCK_PAGES, "image", "messages[0].content[1].source.content[0]"),
    ("messages", block_tool, BLOCK_IMAGE, "image", "messages[2].content[0].content[0]"),
    ("messages", block_tool, BLOCK_PDF, "document", "messages[2].content[0].content[0].source"),
    ("messages", block_tool, BLOCK_PAGES, "image", "messages[2].content[0].content[0].source.content[0]"),
]


@cache
def apis(strict: bool) -> dict[str, Callable[[bytes], RequestPlan]]:
    """How each API plans a body."""
    options: Any = {"strict_requests": strict}
    return {
        "chat": planners(ServeConfig(**options)).chat,
        "responses": make_dialect(**options).plan,
        "messages": serving.make_dialect(**options).plan,
    }


def plan(api: str, conversation: Conversation, *, strict: bool = False) -> RequestPlan:
    fields = {"input" if api == "responses" else "messages": conversation}
    if api == "messages":
        fields["max_tokens"] = 9  # type: ignore[assignment]
    return apis(strict)[api](json.dumps(fields).encode())


@pytest.mark.parametrize(("api", "place", "part", "kind", "field"), CASES)
def test_the_model_is_told_and_the_client_warned(
    api: str, place: Callable[[dict[str, Any]], Conversation], part: dict[str, Any], kind: str, field: str
) -> None:
    """A history with such a part, as tools that show files make it, must not be refused forever."""
    made = plan(api, place(part))
    assert str(made.prompts).count(placeholder(kind)) == 1
    assert DATA not in str(made.prompts)
    sense = "hear" if kind == "recording" else "see"
    assert made.warning == (
        f"{field.partition('[')[0]}: the model reads text only and cannot {sense} {kind}s; "
        "it was told so in their place"
    )


@pytest.mark.parametrize(("api", "place", "part", "kind", "field"), CASES)
def test_a_strict_server_names_the_part(
    api: str, place: Callable[[dict[str, Any]], Conversation], part: dict[str, Any], kind: str, field: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plan(api, place(part), strict=True)
    assert (caught.value.status, caught.value.param) == (400, field)
    assert f"{kind}s" in caught.value.message
    assert "--strict-requests" in caught.value.message
    assert DATA not in caught.value.message


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("strict", [False, True])
def test_text_alone_is_no_matter(api: str, strict: bool) -> None:
    assert plan(api, [{"role": "user", "content": "Hi"}], strict=strict).warning is None


def test_a_warning_names_everything_once() -> None:
    made = plan("messages", [{"role": "user", "content": [BLOCK_PDF, BLOCK_IMAGE, BLOCK_IMAGE, BLOCK_PDF]}])
    assert made.warning is not None
    assert "cannot see documents, images;" in made.warning
    heard = plan("responses", [{"role": "user", "content": [ITEM_FILE, ITEM_AUDIO]}])
    assert heard.warning is not None
    assert "cannot see documents or hear recordings;" in heard.warning
