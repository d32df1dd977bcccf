"""Conversations of chat completions as clients of the other APIs send them."""

from __future__ import annotations

import json
from typing import Any

from tests.templates.talks import Talk


def responses_body(talk: Talk) -> bytes:
    """For ``/v1/responses``: every message as the items that its replies have."""
    items: list[dict[str, Any]] = []
    for number, message in enumerate(talk.messages):
        thought, texts = _thought(message), _texts(message)
        if thought:
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
        if message["role"] == "tool":
            parts = [{"type": "input_text", "text": text} for text in texts]
            output = parts if isinstance(message.get("content"), list) else "".join(texts)
            id = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": id, "output": output})
        elif message["role"] == "assistant" and texts:
            parts = [
                {"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts
            ]
            items.append(_item(f"msg_{number}", "message", role="assistant", content=parts))
        elif message["role"] != "assistant":
            parts = [{"type": "input_text", "text": text} for text in texts or [""]]
            items.append({"role": message["role"], "content": parts})
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            name = call["function"]["name"]
            items.append(
                _item(f"fc_{number}", "function_call", call_id=call["id"], name=name, arguments=text)
            )
    tools = [{"type": "function", **tool["function"]} for tool in talk.tools or ()]
    return json.dumps({"input": items, "tools": tools}).encode()


def messages_body(talk: Talk) -> bytes:
    """For ``/v1/messages``: every message as blocks."""
    turns: list[dict[str, Any]] = []
    head: list[dict[str, Any]] = []
    for message in talk.messages:
        blocks = [{"type": "text", "text": text} for text in _texts(message)]
        role = message["role"]
        if role in ("system", "developer"):
            if turns:
                turns.append({"role": "system", "content": blocks})
            else:
                head += blocks
            continue
        if role == "tool":
            id = message["tool_call_id"]
            role, blocks = "user", [{"type": "tool_result", "tool_use_id": id, "content": blocks}]
        if thought := _thought(message):
            blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": "x"})
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"] or "{}"
            given = json.loads(given) if isinstance(given, str) else given
            name = call["function"]["name"]
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    tools = [
        {
            "name": tool["function"]["name"],
            "input_schema": tool["function"].get("parameters", {"type": "object"}),
        }
        for tool in talk.tools or ()
    ]
    body = {"model": "tiny-llama", "max_tokens": 9, "system": head, "messages": turns, "tools": tools}
    return json.dumps(body).encode()


def _item(id: str, type: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "type": type, "status": "completed", **fields}


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in content or () if part["type"] == "text"]


def _thought(message: dict[str, Any]) -> str:
    names = ("reasoning", "reasoning_content", "thinking", "thought")
    named = next((message[name] for name in names if message.get(name)), "")
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return named or "".join(part["thinking"] for part in parts if part["type"] == "thinking")
