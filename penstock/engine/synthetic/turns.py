"""Finds the turns of a conversation in the text of its prompt, by the marks of the chat template."""

from __future__ import annotations

import re
from typing import NamedTuple

_FAMILIES = (
    # ChatML: Qwen, Hermes and many others; Phi 4
    r"<\|im_start\|>(?P<role>[\w.-]+)(?:<\|im_sep\|>\n?|[^\n]*\n)",
    # Kimi
    r"<\|im_(?:system|user|assistant)\|>(?P<role>[^<]*)<\|im_middle\|>",
    # Llama 3 and 4
    r"<\|(?:start_header_id|header_start)\|>(?P<role>\w+)<\|(?:end_header_id|header_end)\|>\s*",
    # gpt-oss: a tool's role is its name
    r"<\|start\|>(?P<role>[\w.-]+)[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?(?:<\|message\|>|\Z)",
    # GLM, Phi
    r"<\|(?P<role>system|developer|user|assistant|observation|tool|tool_result)\|>\n?",
    # DeepSeek: a list of results, or each of them, has marks
    r"(?:<｜|(?<=<｜end▁of▁sentence｜>\n\n)<(?=function_r)|\n<(?=/function_r))"
    r"(?P<role>User|Assistant|tool▁outputs?▁(?:begin|end)|/?function_results)｜?>",
    # Granite
    r"<\|start_of_role\|>(?P<role>\w+)[^<]*<\|end_of_role\|>",
    # MiniMax
    r"\]~b\](?P<role>\w+)[^\n]*\n",
    # Gemma 4: results stand within the model's turn; the mark alone ends its calls
    r"<(?:\|turn>(?=\w+\n)|\|(?=tool_response>response:)|(?=tool_response\|>))(?P<role>\w+\|?)[\n>]",
    # Gemma
    r"<start_of_turn>(?P<role>\w+)\n",
    # Mistral
    r"\[(?P<role>SYSTEM_PROMPT|AVAILABLE_TOOLS|INST|/INST|TOOL_RESULTS|/TOOL_RESULTS)\]",
)
_HEADERS = tuple(re.compile(pattern) for pattern in _FAMILIES)
_ENDS = (
    *("/inst", "/tool_results", "/function_results", "tool_response|"),
    *("tool▁output▁end", "tool▁outputs▁end"),
)
"""Marks of the end of a message, after which the model writes or another message follows."""
_ROLES = {
    "inst": "user",
    **dict.fromkeys(_ENDS, "assistant"),
    "tool_results": "tool",
    "available_tools": "system",
    "tool_declare": "system",
    "system_prompt": "system",
    "developer": "system",
    "observation": "tool",
    "ipython": "tool",
    "ai": "assistant",
    "model": "assistant",
}
_KNOWN = ("system", "user", "assistant", "tool")
_RESULT = re.compile(r"\s*<tool_(?:response[ >]|result>)")
"""Templates of Qwen and DeepSeek show results of tools as turns of the user, as the server does where a
template has no place for them."""
_CALLED = re.compile(r"(?<= to=)functions\.[\w.-]+")
"""gpt-oss names the tool before the text of a call."""
_END = re.compile(r"(?:\s|<[|｜][^<>\s]*[|｜]>|</s>|<end_of_turn>|<turn\|>|\[e~\[|\[/?[A-Z_]+\])+\Z")
"""What templates put after a turn's text."""


class Turn(NamedTuple):
    """What the model answers: the messages of the user and of tools since its last reply."""

    text: str
    """Text of the messages, one a line."""
    is_tool: bool
    """Whether results of tools are among them."""
    reply_before: str
    """The reply before them, empty for the first turn."""
    end: int
    """Index in the prompt at which the turn ends."""


def turns_of(prompt: str) -> list[Turn]:
    """The turns of a prompt, the one to be answered last. One without marks of a known template is one turn.

    The template is the one whose mark comes first, so that marks of others may be part of texts. Messages of
    the system belong to no turn.
    """
    first = [(match.start(), header) for header in _HEADERS if (match := header.search(prompt))]
    if not first:
        return [Turn(prompt, False, "", len(prompt))]
    _, header = min(first, key=lambda each: each[0])
    marks = list(header.finditer(prompt))
    turns: list[Turn] = []
    texts: list[str] = []
    is_tool = False
    reply = before = ""
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(prompt)
        if mark["role"].lower() in _ENDS and end < len(prompt) and not prompt[mark.end() : end].strip():
            continue  # the model writes nothing here
        text = _END.sub("", prompt[mark.end() : end])
        role = _role(mark["role"], text)
        if role == "assistant":
            if texts:
                turns.append(Turn("\n".join(texts), is_tool, before, mark.start()))
                texts, is_tool, reply = [], False, ""
            called = _CALLED.search(mark[0])
            reply += text if called is None else f"{called[0]} {text}"
        elif role != "system":
            if not texts:
                before = reply
            texts.append(text)
            is_tool |= role == "tool"
    if texts:
        turns.append(Turn("\n".join(texts), is_tool, before, len(prompt)))
    return turns or [Turn(prompt, False, "", len(prompt))]


def _role(name: str, text: str) -> str:
    name = name.lower()
    role = _ROLES.get(name, name)
    if role == "user" and _RESULT.match(text):
        return "tool"
    return role if role in _KNOWN else "tool"
