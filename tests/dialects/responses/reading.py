"""Reads the events of a streamed response as a strict client does."""

from __future__ import annotations

import json
from typing import Any

from penstock.dialects.responses.reasoning_content import seal_reasoning

ENDS = ("response.completed", "response.incomplete", "response.failed")
_TEXTS = {
    "response.output_text": ("text", "content"),
    "response.reasoning_text": ("text", "content"),
    "response.reasoning_summary_text": ("text", "summary"),
    "response.function_call_arguments": ("arguments", None),
    "response.custom_tool_call_input": ("input", None),
}
"""Kinds of text: its field in the event that ends it, and the item's list of parts."""
_PARTS = ("response.content_part", "response.reasoning_summary_part")


def events_of(data: str) -> list[dict[str, Any]]:
    """The events of a body. Asserts that names and types agree."""
    events = []
    for block in data.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, text = lines
        event = json.loads(text.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def final_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event's response. Asserts that the events before it have told all of it, in order."""
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events))), numbers
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert events[-1]["type"] in ENDS
    final: dict[str, Any] = events[-1]["response"]
    assert f"response.{final['status']}" == events[-1]["type"]
    unchanged = set(first) - {"status", "output", "usage", "completed_at", "error", "incomplete_details"}
    assert {key: first[key] for key in unchanged} == {key: final[key] for key in unchanged}
    items = _Items()
    for event in events[2:-1]:
        items.read(event)
    told = items.done
    if items.open is not None:
        assert final["status"] == "failed", "an item that never ends"
        told = [*told, items.unfinished()]
    assert final["output"] == told
    return final


class _Items:
    """The items, event by event."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[Any] = []
        self._part: dict[str, Any] | None = None
        self._text_done = False

    def read(self, event: dict[str, Any]) -> None:
        kind, _, what = event["type"].rpartition(".")
        assert event["output_index"] == len(self.done)
        if event["type"] == "response.output_item.added":
            assert self.open is None, "two items are open"
            self.open = event["item"]
            assert self.open is not None
            assert self.open["status"] == "in_progress"
            self._text, self._part, self._text_done, self._logprobs = "", None, False, []
            return
        assert self.open is not None
        if event["type"] == "response.output_item.done":
            assert self._text_done
            assert event["item"]["id"] == self.open["id"]
            assert event["item"]["type"] == self.open["type"]
            assert event["item"] == self._expected(event["item"]["status"])
            self.done.append(event["item"])
            self.open = None
            return
        assert event["item_id"] == self.open["id"]
        if kind in _PARTS:
            self._read_part(event, what)
            return
        field, parts = _TEXTS[kind]
        assert not self._text_done
        assert (self._part is None) == (parts is None)
        if what == "delta":
            self._text += event["delta"]
            self._logprobs += event.get("logprobs", [])
        else:
            assert what == "done"
            assert event[field] == self._text
            self._text_done = True

    def _read_part(self, event: dict[str, Any], what: str) -> None:
        if what == "added":
            assert self._part is None
            self._part = event["part"]
            assert event["part"]["text"] == ""
            return
        assert self._part is not None
        assert self._text_done
        assert event["part"]["text"] == self._text
        assert event["part"].get("logprobs", []) == self._logprobs
        self._part = event["part"]

    def _expected(self, status: str) -> dict[str, Any]:
        assert self.open is not None
        item = {**self.open, "status": status}
        if "arguments" in item or "input" in item:
            item["arguments" if "arguments" in item else "input"] = self._text
        elif self.open["type"] == "message" or "content" in item:
            item["content"] = [self._part]
        else:
            item["summary"] = [self._part]
        if item.get("encrypted_content", "") is None:
            item["encrypted_content"] = seal_reasoning(self._text)
        return item

    def unfinished(self) -> dict[str, Any]:
        """The open item in a response that failed."""
        if self._part is not None:
            self._part = {**self._part, "text": self._text}
            if "logprobs" in self._part:
                self._part["logprobs"] = self._logprobs
        return self._expected("incomplete")
