"""The prompts that transformers renders, of the spellings of a conversation that it renders without loss."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
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
    found = _NOISE.search(prompt)
    if found is None and "None" not in template and talk.shape["arguments"] != "nested":
        found = re.search(r"\bNone\b", prompt)
    return None if found is None else prompt[found.start() : found.start() + 40]


def lost(talk: Talk, prompt: str) -> list[str]:
    """The words of the conversation that the prompt does not have."""
    return [word for word in talk.words if word not in prompt]


def references(template: str, talk: Talk) -> Iterator[str]:
    """What transformers makes of the conversation, in each spelling that it renders without loss."""
    for named in (_named, copy.deepcopy):
        for spelled in _arguments(named(talk.messages)):
            prompt = rendered(template, talk, spelled)
            if prompt is not None and not lost(talk, prompt):
                yield prompt


def _named(messages: Messages) -> Messages:
    """Results with the name of their function, and reasoning under every name."""
    messages = copy.deepcopy(messages)
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            message["name"] = names[message["tool_call_id"]]
        if "thought" in message:
            message["reasoning_content"] = message["thought"]
        if isinstance(message.get("content"), list):
            thoughts = [part["thinking"] for part in message["content"] if part["type"] == "thinking"]
            message["content"] = [part for part in message["content"] if part["type"] != "thinking"] or ""
            message |= {"reasoning_content": thoughts[0]} if thoughts else {}
    return messages


def fuller(talk: Talk, prompt: str, other: str) -> bool:
    """Whether ``prompt`` has reasoning or calls that ``other`` lacks."""
    words = [*talk.thoughts, "look_up", "add", "now"]
    return any(prompt.count(word) > other.count(word) for word in words) or (
        prompt.count("None") < other.count("None")
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
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def _text(arguments: Any) -> str:
    return arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments)
