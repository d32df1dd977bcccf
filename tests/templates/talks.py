"""Conversations as clients send them, in every shape, and the words of them that a prompt must have."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

SHAPES: dict[str, tuple[Any, ...]] = {
    "system": (
        "none",
        "text",
        "part",
        "parts",
        "developer",
        "developer parts",
        "system and developer",
        "two systems",
        "later system",
        "later developer",
        "system and later system",
        "system and later developer",
        "empty",
        "greeting",
    ),
    "user": ("text", "part", "parts", "twice", "two names"),
    "beside": ("null", "missing", "empty", "text", "part", "parts"),
    "answer": ("text", "part", "parts", "twice", "reasoning alone", "none", "mark", "empty"),
    "arguments": ("text", "object", "empty", "nested", "none at all", "broken"),
    "reasoning": (
        "none",
        "reasoning_content",
        "reasoning",
        "thinking",
        "thought",
        "thinking part",
        "both names",
    ),
    "result": ("text", "part", "parts", "JSON", "empty", "null", "missing"),
    "calls": (0, 1, 2, 3),
    "order": ("in order", "out of order", "one missing", "none"),
    "between": ("none", "user", "assistant", "system", "developer"),
    "rounds": (1, 2),
    "turns": (1, 2, 3, 6),
    "tools": ("full", "no description", "no parameters", "bare", "brief parameters", "none"),
    "ids": ("long", "nine"),
    "end": ("results", "question", "answer", "continued", "continued part", "continued reasoning"),
    "extras": ("none", "as replied"),
}
"""Every dimension of a conversation; the first of each is the usual one."""
USUAL = {name: values[0] for name, values in SHAPES.items()} | {"system": "text", "calls": 1}


@dataclass
class Talk:
    """One conversation."""

    shape: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    words: list[str] = field(default_factory=list)
    """Unique words of texts, arguments and results."""
    thoughts: list[str] = field(default_factory=list)
    """Those of reasoning."""
    forgotten: list[str] = field(default_factory=list)
    """Words that are in no message."""
    options: dict[str, Any] = field(default_factory=dict)
    """add_generation_prompt and continue_final_message."""

    @property
    def name(self) -> str:
        """What is unusual of it."""
        unusual = [f"{name}={value}" for name, value in self.shape.items() if value != USUAL[name]]
        return ", ".join(unusual) or "usual"

    def word(self) -> str:
        word = f"w{len(self.words):02}q{len(self.words) * 7919 % 1000:03}"
        self.words.append(word)
        return word

    def thought(self) -> str:
        thought = f"t{len(self.thoughts):02}q{len(self.thoughts) * 7919 % 1000:03}"
        self.thoughts.append(thought)
        return f"Let me {thought}."

    def content(self, shape: str) -> Any:
        match shape:
            case "part":
                return [_part(f"Say {self.word()}.")]
            case "parts":
                return [_part(f"Say {self.word()}."), _part(f'Then "{self.word()}" é.')]
            case _:
                return f"Say {self.word()}."


def talks(count: int) -> list[Talk]:
    """One for each value of each dimension, then ``count`` of mixed ones."""
    shapes = [USUAL | {name: value} for name, values in SHAPES.items() for value in values]
    shapes += [USUAL | {"calls": 2, "order": "out of order"}, USUAL | {"calls": 0, "turns": 3}]
    shapes += [USUAL | {"calls": 0, "end": end} for end in SHAPES["end"]]
    shapes += [USUAL | {"calls": 0, "turns": 2, "reasoning": key} for key in SHAPES["reasoning"]]
    shapes += [USUAL | {"calls": 0, "system": system, "turns": 2} for system in SHAPES["system"]]
    shapes += [USUAL | {"reasoning": "reasoning", "beside": beside} for beside in SHAPES["beside"]]
    shapes += [
        USUAL | {"turns": 2, "calls": calls, "answer": answer}
        for answer in SHAPES["answer"]
        for calls in (0, 1)
    ]
    shapes += [USUAL | {"calls": 2, "order": "one missing", "turns": 2}]
    shapes += [
        USUAL | {"calls": calls, "order": order, "between": between, "turns": 2}
        for between in SHAPES["between"]
        for calls, order in ((1, "in order"), (2, "in order"), (1, "none"))
    ]
    draw = random.Random(34)
    shapes += [{name: draw.choice(values) for name, values in SHAPES.items()} for _ in range(count)]
    return [made(shape) for shape in {json.dumps(shape): shape for shape in shapes}.values()]


def made(shape: dict[str, Any]) -> Talk:
    """The conversation of a shape."""
    talk = Talk(shape)
    said = talk.messages
    said += _head(talk, shape["system"])
    turns = shape["turns"]
    for turn in range(turns):
        if turn == 1 and "later" in shape["system"]:
            said.append({"role": shape["system"].rpartition(" ")[2], "content": talk.content("text")})
        said.append({"role": "user", "content": talk.content(shape["user"])})
        if shape["user"] in ("twice", "two names"):
            said.append({"role": "user", "content": talk.content("text")})
        if shape["user"] == "two names":
            said[-2]["name"], said[-1]["name"] = "ann", "bob"
        if shape["calls"]:
            for _ in range(shape["rounds"]):
                _call(talk, shape)
        if turn < turns - 1 or shape["end"] in ("question", "answer"):
            said += _answers(talk, shape)
    _end(talk, shape["end"])
    talk.tools = _tools(shape["tools"]) if shape["calls"] else None
    return talk


def _head(talk: Talk, shape: str) -> list[dict[str, Any]]:
    match shape:
        case "none" | "later system" | "later developer":
            return []
        case "empty":
            return [{"role": "system", "content": ""}]
        case "greeting":
            return [{"role": "assistant", "content": talk.content("text")}]
        case "system and developer":
            return [{"role": role, "content": talk.content("text")} for role in ("system", "developer")]
        case "two systems":
            return [{"role": "system", "content": talk.content("text")} for _ in range(2)]
        case "developer" | "developer parts":
            return [{"role": "developer", "content": talk.content(shape.partition(" ")[2])}]
        case _:
            return [{"role": "system", "content": talk.content(shape)}]


def _call(talk: Talk, shape: dict[str, Any]) -> None:
    message: dict[str, Any] = {"role": "assistant"}
    match shape["beside"]:
        case "null":
            message["content"] = None
        case "missing":
            pass
        case "empty":
            message["content"] = ""
        case other:
            message["content"] = talk.content(other)
    _think(talk, message, shape["reasoning"])
    start = sum(len(each.get("tool_calls", ())) for each in talk.messages)
    message["tool_calls"] = calls = []
    for number in range(start, start + shape["calls"]):
        id = f"call{number:05}" if shape["ids"] == "nine" else f"call_{number:024x}"
        function = {"name": ("look_up", "add", "now")[number % 3], **_arguments(talk, shape["arguments"])}
        calls.append({"id": id, "type": "function", "function": function})
    _extra(message, shape["extras"])
    talk.messages.append(message)
    results = []
    for call in calls:
        content: Any = ""
        if shape["between"] != "none" and shape["result"] in ("empty", "null", "missing"):
            content = talk.content("text")
        elif shape["result"] == "JSON":
            content = json.dumps({"found": talk.word()})
        elif shape["result"] == "null":
            content = None
        elif shape["result"] not in ("empty", "missing"):
            content = talk.content(shape["result"])
        results.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if shape["result"] == "missing" and shape["between"] == "none":
            del results[-1]["content"]
    match shape["order"]:
        case "out of order":
            results.reverse()
        case "one missing":
            gone = json.dumps(results.pop())
            talk.forgotten += [word for word in talk.words if word in gone]
        case "none":
            talk.forgotten += [word for word in talk.words if word in json.dumps(results)]
            results = []
    if shape["between"] != "none":
        results.insert(len(results) // 2, {"role": shape["between"], "content": talk.content("text")})
    talk.messages += results


def _arguments(talk: Talk, shape: str) -> dict[str, Any]:
    if shape == "none at all":
        return {"arguments": ""}
    arguments: dict[str, Any] = {} if shape == "empty" else {"city": talk.word(), "days": 3}
    if shape == "nested":
        arguments["where"] = {"names": [talk.word(), "é"], "exact": True, "near": None}
    text = json.dumps(arguments)
    if shape == "broken":
        text = text[: text.index(",")] if "," in text else text[:-1]
    return {"arguments": arguments if shape == "object" else text}


def _answers(talk: Talk, shape: dict[str, Any]) -> list[dict[str, Any]]:
    if shape["answer"] == "none":
        return []
    if shape["answer"] == "reasoning alone":
        return [{"role": "assistant", "content": None, "reasoning": talk.thought()}]
    if shape["answer"] == "empty":
        return [{"role": "assistant", "content": ""}]
    message = {"role": "assistant", "content": talk.content(shape["answer"])}
    if shape["answer"] == "mark":
        message["content"] += f" Not </think> but {talk.word()}."
    _think(talk, message, shape["reasoning"])
    _extra(message, shape["extras"])
    more = {"role": "assistant", "content": talk.content("text")} if shape["answer"] == "twice" else None
    return [message, more] if more else [message]


def _think(talk: Talk, message: dict[str, Any], key: str) -> None:
    if key == "none":
        return
    if key == "thinking part":
        content = message.get("content") or []
        parts = [_part(content)] if isinstance(content, str) else content
        message["content"] = [{"type": "thinking", "thinking": talk.thought()}, *parts]
        return
    names = ("reasoning", "reasoning_content") if key == "both names" else (key,)
    message |= dict.fromkeys(names, talk.thought())


def _extra(message: dict[str, Any], shape: str) -> None:
    """What this server's replies have besides."""
    if shape == "as replied":
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
        message.setdefault("reasoning", None)


def _end(talk: Talk, shape: str) -> None:
    if shape == "question":
        talk.messages.append({"role": "user", "content": talk.content("text")})
    elif shape == "answer":
        talk.options = {"add_generation_prompt": False}
    elif shape.startswith("continued"):
        talk.options = {"add_generation_prompt": False, "continue_final_message": True}
        if shape == "continued reasoning":
            talk.messages.append({"role": "assistant", "content": None, "reasoning": talk.thought()})
        else:
            content = talk.content(shape.partition(" ")[2])
            talk.messages.append({"role": "assistant", "content": content})


def _tools(shape: str) -> list[dict[str, Any]] | None:
    if shape == "none":
        return None
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How long."},
        },
        "required": ["city"],
    }
    if shape == "brief parameters":
        schema["properties"] = {"city": {"type": "string"}, "days": {"type": "integer"}}
    functions = []
    for name in ("look_up", "add", "now"):
        function: dict[str, Any] = {"name": name}
        if shape in ("full", "no parameters", "brief parameters"):
            function["description"] = f"Does {name}."
        if shape in ("full", "no description", "brief parameters"):
            function["parameters"] = schema
        functions.append({"type": "function", "function": function})
    return functions


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
