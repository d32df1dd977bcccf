"""Sessions of agents in the three dialects: bodies that continue, change, cut and repeat one another."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
WORDS = (
    "parse the file",
    "größer – 日本語 👩‍👩‍👧‍👦",
    'quoted "text" and \\ slashes\n\ttabs',
    "<think>not a thought</think>",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "[INST] no [/INST]",
    "",
    " spaces around ",
    '"messages":[{"role":"user"}]',
    "\u2028\ue000 control \x07",
)


class Session:
    """One conversation, played turn by turn."""

    def __init__(self, dialect: str, seed: int) -> None:
        self.dialect = dialect
        self._draw = random.Random(seed)
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._fields: dict[str, Any] = {"max_tokens": 4} if dialect != RESPONSES else {"max_output_tokens": 4}
        self._ensure_ascii = self._draw.random() < 0.5
        self._spaced = self._draw.random() < 0.3
        if self._draw.random() < 0.7:
            self._add_head()
        if self._draw.random() < 0.7:
            self._fields["tools"] = [self._tool(name) for name in ("edit", "search")]
        if self._draw.random() < 0.3:
            self._fields["cache_salt"] = f"salt{seed % 3}"
        for _ in range(self._draw.randrange(1, 9)):
            self._step()

    def bodies(self, turns: int) -> Iterator[bytes]:
        """The bodies of its turns."""
        for _ in range(turns):
            for _ in range(self._draw.randrange(0, 3)):
                self._step()
            self._change()
            yield self._body()

    def _body(self) -> bytes:
        draw, fields, items = self._draw, dict(self._fields), list(self._items)
        if items and draw.random() < 0.05:
            items[draw.randrange(len(items))] = {"role": draw.choice(("user", "wizard", None))}
        name = "input" if self.dialect == RESPONSES else "messages"
        whole = {name: items, **fields} if draw.random() < 0.8 else {**fields, name: items}
        separators = (", ", ": ") if self._spaced else (",", ":")
        text = json.dumps(whole, ensure_ascii=self._ensure_ascii, separators=separators)
        if draw.random() < 0.03:  # the last one counts
            text = f'{text[:-1]},"{name}":{json.dumps(self._items[1:])}}}'
        if draw.random() < 0.03:
            text = text.replace('"role"', '"unknown":1,"role"', 1)
        if draw.random() < 0.02:
            text = text[: draw.randrange(len(text))]
        return text.encode("utf-8", "surrogatepass")

    # -- what happens in a turn

    def _step(self) -> None:
        if self._draw.random() < 0.6:
            self._add_calls()
        else:
            self._add_text("assistant")
        if self._draw.random() < 0.4:
            self._add_text("user")

    def _change(self) -> None:
        draw, items = self._draw, self._items
        kind = draw.random()
        place = draw.randrange(len(items)) if items else 0
        if kind < 0.05 and items:
            del items[place]
        elif kind < 0.08:
            del items[place:]
        elif kind < 0.12 and items:
            items[place] = dict(items[place], content=self._text())
        elif kind < 0.15 and items:
            items.insert(place, dict(items[draw.randrange(len(items))]))
        elif kind < 0.18:
            self._fields["tools"] = [self._tool(self._word()[:8].strip() or "other")]
        elif kind < 0.20:
            self._fields.pop("tools", None)
        elif kind < 0.23 and self.dialect == RESPONSES:
            self._fields["instructions"] = self._text()
        elif kind < 0.26 and self.dialect == MESSAGES:
            self._fields["system"] = self._text()
        elif kind < 0.34 and items and self.dialect == MESSAGES:
            self._mark_last()

    def _mark_last(self) -> None:
        """As clients of Anthropic move the mark of what is cached."""
        for item in self._items:
            if isinstance(item.get("content"), list):
                for block in item["content"]:
                    block.pop("cache_control", None)
        content = self._items[-1].get("content")
        if isinstance(content, list) and content:
            content[-1]["cache_control"] = {"type": "ephemeral"}

    def _add_head(self) -> None:
        if self.dialect == CHAT:
            self._items.append({"role": self._draw.choice(("system", "developer")), "content": self._text()})
        elif self.dialect == RESPONSES:
            self._fields["instructions"] = self._text()
        else:
            self._fields["system"] = [{"type": "text", "text": self._text()}]
        self._add_text("user")

    def _add_text(self, role: str) -> None:
        text, draw = self._text(), self._draw
        thought = role == "assistant" and draw.random() < 0.4
        if self.dialect == CHAT:
            message: dict[str, Any] = {"role": role, "content": text}
            if draw.random() < 0.3:
                message["content"] = [{"type": "text", "text": text}, {"type": "text", "text": self._text()}]
            if draw.random() < 0.04 and role == "user":
                message["content"] = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
            if thought:
                message["reasoning_content"] = self._text()
            self._items.append(message)
        elif self.dialect == RESPONSES:
            if thought:
                summary = [{"type": "summary_text", "text": self._text()}]
                self._items.append({"type": "reasoning", "id": "rs_1", "summary": summary})
            kind = "output_text" if role == "assistant" else "input_text"
            content = text if draw.random() < 0.4 else [{"type": kind, "text": text}]
            self._items.append({"type": "message", "role": role, "content": content})
        else:
            blocks: list[dict[str, Any]] = [{"type": "text", "text": text}]
            if thought:
                blocks.insert(0, {"type": "thinking", "thinking": self._text(), "signature": ""})
            self._items.append({"role": role, "content": text if draw.random() < 0.3 else blocks})

    def _add_calls(self) -> None:
        draw = self._draw
        calls = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            self._number += 1
            calls.append((f"call_{self._number}", draw.choice(("edit", "search")), self._arguments()))
        text = self._text() if draw.random() < 0.5 else ""
        if self.dialect == CHAT:
            told = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for id, name, given in calls
            ]
            if draw.random() < 0.2:
                told[0]["function"]["arguments"] = calls[0][2]  # type: ignore[index]
            self._items.append({"role": "assistant", "content": text or None, "tool_calls": told})
            self._items += [
                {"role": "tool", "tool_call_id": id, "content": self._text()} for id, _, _ in calls
            ]
        elif self.dialect == RESPONSES:
            for id, name, given in calls:
                arguments = json.dumps(given)
                self._items.append(
                    {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
                )
            self._items += [
                {"type": "function_call_output", "call_id": id, "output": self._text()} for id, _, _ in calls
            ]
        else:
            used = [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in calls]
            said = [{"type": "text", "text": text}] if text else []
            self._items.append({"role": "assistant", "content": [*said, *used]})
            results = [
                {"type": "tool_result", "tool_use_id": id, "content": self._text()} for id, _, _ in calls
            ]
            self._items.append({"role": "user", "content": results})

    def _arguments(self) -> dict[str, Any]:
        draw = self._draw
        values = (1, True, 1.0, 0, False, None, self._word(), [1, 2], {"b": 1, "a": 2}, {"a": 2, "b": 1})
        return {name: draw.choice(values) for name in draw.sample(("path", "text", "line"), 2)}

    def _tool(self, name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"path": {"type": "string", "description": self._word()}}}
        if self.dialect == MESSAGES:
            return {"name": name, "description": self._word(), "input_schema": schema}
        function = {"name": name, "description": self._word(), "parameters": schema}
        nested = {"function": function} if self.dialect == CHAT else function
        return {"type": "function", **nested}

    def _word(self) -> str:
        return self._draw.choice(WORDS)

    def _text(self) -> str:
        return " ".join(self._word() for _ in range(self._draw.choice((1, 3, 40))))
