"""Scripts for the synthetic engine: the turns of whole tasks of an agent."""

from __future__ import annotations

from typing import Any

Call = tuple[str, dict[str, Any]]


def task(name: str, *turns: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules of a task, whose first message contains its name; a turn that is not as expected matches
    none, which fails the task."""
    rules = []
    for number, turn in enumerate(turns, 1):
        given = dict(turn)
        match = {"prompt": rf"{name}\b", "turn": number, **given.pop("match", {})}
        rules.append({"match": match, **given})
    return rules


def call(*calls: Call, after: tuple[str, str] | None = None, **reply: str) -> dict[str, Any]:
    """A turn answered with calls. ``after``: the tool whose result it follows, and a text in that result."""
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"match": _after(after), "reply": {**reply, "calls": written}}


def report(text: str, after: tuple[str, str], **fields: Any) -> dict[str, Any]:
    """A turn answered with the end of the task."""
    return {"match": _after(after), "reply": {"text": text}, **fields}


def _after(after: tuple[str, str] | None) -> dict[str, Any]:
    if after is None:
        return {"last": "user"}
    tool, text = after
    return {"tool": tool, "text": text}
