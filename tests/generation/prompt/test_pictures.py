"""Pictures under templates as models with vision have them: none is lost, and they keep their order."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.request.unsupported_content import IMAGE_FOLLOWS
from penstock.http.errors import ApiError
from penstock.wire.media.worker import MediaDescription
from tests.generation.planning import tiny_input_processor

MARK = "<image>"
# LLaVA: lists alone; the pictures of a message come before its texts; no tools.
LLAVA = """{% for m in messages %}{{ m.role.upper() }}: {% for p in m.content if p.type == 'image' %}<image>
{% endfor %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %} {% endfor %}"""
# Idefics3, SmolVLM: lists alone, in order; how a turn begins depends on its first part.
IDEFICS = """{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image'
else ': ' }}
{%- for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}
<end_of_utterance>
{% endfor %}"""
# Gemma 3: turns alternate, instructions go into the user's first; the model's role has another name.
GEMMA = """{% if messages[0].role == 'system' %}{% set start = messages[0].content if
messages[0].content is string else messages[0].content[0].text %}
{%- set talk = messages[1:] %}{% else %}{% set start = '' %}
{%- set talk = messages %}{% endif %}{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ start if loop.first else '' }}{% if m.content is string %}{{ m.content | trim }}{% else %}
{%- for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}
{%- endif %}<end_of_turn>
{% endfor %}"""
# Qwen2-VL, Qwen2.5-VL: texts or lists, pictures between marks and counted, in every role.
QWEN = """{% set n = namespace(images=0) %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}
{%- if p.type == 'image' or 'image' in p or 'image_url' in p %}{% set n.images = n.images + 1
%}Picture {{ n.images }}:
{#- -#} <|vision_start|><image><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}
{%- endif %}{% for call in m.tool_calls or []
%}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
# Llama 4, InternVL: texts or lists; results of tools are printed as JSON if they are no text.
LLAMA = """{% for m in messages %}<|header|>{{ m.role }}<|end|>
{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}
{%- elif m.role == 'tool' and m.content is not string %}{{ m.content | tojson }}
{%- elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image'
%}<image>
{%- else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|eot|>{% endfor %}"""
# Mistral Small 3.1, Pixtral: the user's and the assistant's turns alternate, results are texts.
MISTRAL = """{% set n = namespace(users=true) %}{% for m in messages %}{% if m.role in ['user', 'assistant']
and not m.tool_calls %}{% if (m.role == 'user') != n.users %}{{
raise_exception('turns must alternate') }}{% endif %}
{%- set n.users = not n.users %}{% endif %}{% if m.role == 'user' %}[INST]{% if
m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{%
elif p.type in ['image', 'image_url'] %}<image>
{%- endif %}{% endfor %}{% endif %}[/INST]{% elif m.role == 'system' %}[SYSTEM]{{ m.content }}[/SYSTEM]
{%- elif m.tool_calls %}[CALLS]{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}
{%- elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}{{ m.content }}</s>{% endif
%}{% endfor %}"""
# Phi-3.5-vision, DeepSeek-VL: texts alone.
PHI = "{% for m in messages %}<|{{ m.role }}|>{{ m.content + '<|end|>' }}{% endfor %}"
# A template for texts that takes lists, and drops what it does not know.
TEXTS = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif
%};{% endfor %}"""
TEMPLATES = {
    "llava": LLAVA,
    "idefics": IDEFICS,
    "gemma": GEMMA,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "phi": PHI,
    "texts": TEXTS,
}


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"https://a/{number}.png"}}


def text(word: str) -> dict[str, Any]:
    return {"type": "text", "text": word}


def said(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [*content], **more}


def call(*ids: str) -> dict[str, Any]:
    function = {"name": "view", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "function", "function": function} for id in ids],
    }


def result(id: str, *content: Any) -> dict[str, Any]:
    return said("tool", *content, tool_call_id=id)


TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [said("user", text("w1"), image(0), text("w2"))],
    "picture alone": [said("user", image(0))],
    "several": [said("user", image(0), text("w1"), image(1), image(2), text("w2"))],
    "turns": [
        said("user", image(0), text("w1")),
        said("assistant", text("w2")),
        said("user", text("w3"), image(1)),
    ],
    "users in a row": [
        said("user", text("w1"), image(0)),
        said("user", image(1), text("w2")),
        said("user", image(2)),
    ],
    "named users": [said("user", image(0), name="n"), said("user", text("w1"), image(1), name="m")],
    "instructions": [
        said("system", text("w0")),
        said("user", image(0)),
        said("system", text("w1")),
        said("user", image(1), text("w2")),
    ],
    "pictures of instructions": [said("system", text("w0"), image(0)), said("user", text("w1"), image(1))],
    "answers with pictures": [
        said("user", text("w0")),
        said("assistant", text("w1"), image(0)),
        said("user", image(1), text("w2")),
    ],
    "tools": [
        said("user", text("w1"), image(0)),
        call("call00001", "call00002"),
        result("call00001", text("w2"), image(1)),
        result("call00002", image(2)),
        said("assistant", text("w3")),
        said("user", image(3)),
    ],
    "a question after a result": [
        said("user", text("w1")),
        call("call00001"),
        result("call00001", image(0), text("w2")),
        said("user", text("w3"), image(1)),
    ],
    "a late result": [
        said("user", image(0)),
        call("call00001"),
        said("user", image(1), text("w1")),
        result("call00001", text("w2"), image(2)),
        said("user", text("w3"), image(3)),
    ],
    "a stray result": [
        said("user", text("w1"), image(0)),
        result("call00009", image(1)),
        said("user", image(2)),
    ],
}


@cache
def chat(template: str) -> ChatCompletions:
    processor = tiny_input_processor(
        template=ChatTemplate({"default": template}, {}), media=MediaDescription(MARK)
    )
    return ChatCompletions(ServeConfig(), processor)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("talk", TALKS)
def test_every_picture_is_shown_in_order(name: str, talk: str) -> None:
    messages = TALKS[talk]
    plan = chat(TEMPLATES[name]).plan(json.dumps({"messages": messages}).encode())
    [prompt] = plan.prompts
    assert isinstance(prompt, str)
    sent = json.dumps(messages).count('image_url": {')
    assert prompt.count(MARK) == sent
    assert [each.url for each in plan.images] == [f"https://a/{number}.png" for number in range(sent)]
    words = [word for word in ("w0", "w1", "w2", "w3") if word in json.dumps(messages)]
    assert [word for word in words if word not in prompt] == []


def test_where_texts_and_pictures_are_kept_apart_they_keep_their_places() -> None:
    body = json.dumps({"messages": TALKS["several"]}).encode()
    shown = {name: str(chat(template).plan(body).prompts[0]) for name, template in TEMPLATES.items()}
    assert "<image>w1<image><image>w2" in shown["idefics"]
    assert "<image>w1<image><image>w2" in shown["mistral"]
    assert "<image>w1<image><image>w2" in shown["gemma"]
    assert "<image>\nw1\n<image>\n<image>\nw2" in shown["phi"]
    assert "<image>w1<image><image>w2" in shown["texts"]
    assert "Picture 3:<|vision_start|><image><|vision_end|>w2" in shown["qwen"]


def test_a_role_that_takes_pictures_keeps_them() -> None:
    body = json.dumps({"messages": TALKS["a question after a result"]}).encode()
    qwen = str(chat(QWEN).plan(body).prompts[0])
    assert IMAGE_FOLLOWS not in qwen
    assert qwen.index(MARK) < qwen.index("w2") < qwen.index("w3")
    mistral = str(chat(MISTRAL).plan(body).prompts[0])
    assert mistral.index(IMAGE_FOLLOWS) < mistral.index("w2") < mistral.index(MARK) < mistral.index("w3")


def test_a_template_that_shows_pictures_twice_is_an_error() -> None:
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    with pytest.raises(ApiError, match="1 images, and the chat template shows 2"):
        chat(twice).plan(json.dumps({"messages": TALKS["one"]}).encode())


def test_a_message_that_ends_with_a_picture_is_not_continued() -> None:
    body = {"messages": TALKS["picture alone"], "continue_final_message": True}
    with pytest.raises(ApiError, match="ends with an image"):
        chat(QWEN).plan(json.dumps(body).encode())
