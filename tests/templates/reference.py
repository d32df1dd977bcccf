"""The prompts that transformers renders, of the spellings of a conversation that it renders without loss."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tests.templates.talks import Talk

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

_NOISE = re.compile(
    r"\{'(?:type|text|thinking)': '(?:text|thinking|Say|Let)|\{'city': '|"
    r"\{\"type\": ?\"(?:text|thinking)\"|\{\\\\?\"city"
)
"""Values that a template was not made for, printed as Python or JSON spells them."""

Messages = list[dict[str, Any]]


def noise(template: str, talk: Talk, prompt: str) -> str | None:
    """The first such value."""
    shape = talk.shape["arguments"]
    found = [each for each in _NOISE.finditer(prompt) if shape != "broken" or "city" not in each[0]]
    if not found and "None" not in template and shape != "nested":
        found = [*re.finditer(r"\bNone\b", prompt)]
    return prompt[found[0].start() : found[0].start() + 40] if found else None


def lost(talk: Talk, prompt: str) -> list[str]:
    """The words of the conversation that the prompt does not have."""
    return [word for word in talk.words if word not in prompt and word not in talk.forgotten]


def references(template: str, talk: Talk) -> Iterator[str]:
    """What transformers makes of the conversation, in each spelling that it renders without loss."""
    spellings = [_named(talk.messages, None), _named(talk.messages, ""), talk.messages]
    for messages in {json.dumps(each): each for each in spellings}.values():
        for spelled in _arguments(messages):
            prompt = rendered(template, talk, spelled)
            if prompt is not None and not lost(talk, prompt):
                yield prompt


def _named(messages: Messages, nothing: str | None) -> Messages:
    """Results with the name of their function, reasoning under the usual name, and empty texts for null."""
    messages = copy.deepcopy(messages)
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            message["name"] = names[message["tool_call_id"]]
        if message.get("content") is None and not message.get("tool_calls") and message is not messages[-1]:
            message["content"] = ""
        if message["role"] == "tool":
            message["content"] = message.get("content") or ""
        if "thought" in message:
            message["reasoning_content"] = message["thought"]
        if isinstance(message.get("content"), list):
            thoughts = [part["thinking"] for part in message["content"] if part["type"] == "thinking"]
            message["content"] = [
                part for part in message["content"] if part["type"] != "thinking"
            ] or nothing
            message |= {"reasoning_content": thoughts[0]} if thoughts else {}
    return messages


def fuller(template: str, talk: Talk, prompt: str, other: str) -> bool:
    """Whether ``prompt`` has reasoning or calls that ``other`` lacks, or fewer odd values."""
    called = Counter(
        call["function"]["name"] for message in talk.messages for call in message.get("tool_calls", ())
    )
    plain = replace(talk, options={})
    listed = rendered(template, plain, [{"role": "user", "content": "?"}]) or "" if called else ""
    return (
        any(prompt.count(word) > other.count(word) for word in talk.thoughts)
        or any(
            prompt.count(name) > other.count(name) < count + listed.count(name)
            for name, count in called.items()
        )
        or any(prompt.count(word) < other.count(word) for word in ("None", "\nnull<"))
    )


def rendered(template: str, talk: Talk, messages: Messages) -> str | None:
    options: dict[str, Any] = {"add_generation_prompt": True} | talk.options
    if options.get("continue_final_message") and messages[-1].get("content") is None:
        options["continue_final_message"] = "reasoning_content"
    try:
        [prompt], _ = render_jinja_template(
            [copy.deepcopy(messages)],
            tools=copy.deepcopy(talk.tools),
            chat_template=template,
            **options,
            **TOKENS,
        )
    except Exception:  # noqa: BLE001 - whatever a template raises
        return None
    return str(prompt)


def _arguments(messages: Messages) -> Iterator[Messages]:
    """Calls with objects, then with texts."""
    for kind in (_object, _text):
        spelled = copy.deepcopy(messages)
        for call in itertools.chain.from_iterable(each.get("tool_calls", ()) for each in spelled):
            call["function"]["arguments"] = kind(call["function"]["arguments"])
        yield spelled


def _object(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _text(arguments: Any) -> str:
    return arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments)
