"""Scripts for the synthetic engine: the turns of whole tasks of an agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Tools:
    """How an agent's tools are called in its tasks."""

    read: Call
    """Shows config.ini."""
    edit: Call
    """Replaces 3 by 4 in it."""
    edited: str
    """In the result of ``edit``."""
    shell: str
    """The tool that runs a command."""
    command: str
    """Its argument for the command."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Its other arguments."""
    suffix: str = ""
    """Follows each command."""

    def run(self, command: str) -> Call:
        return self.shell, {self.command: command + self.suffix, **self.arguments}


def tasks(agent: str, tools: Tools, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    """The rules of the tasks that all agents do. ``reload``: a command that replaces the API servers."""
    run, shell = tools.run, tools.shell
    read = call(tools.read, text="I look.", reasoning="A file.")
    has_read = (tools.read[0], "speed = 3")
    fails_once = {"end": "error", "after-tokens": 3, "end-times": 1}
    return [
        *task(f"{agent}-read", read, report("The speed is 3.", has_read)),
        *task(
            f"{agent}-edit",
            read,
            call(tools.edit, after=has_read),
            call(run("cat config.ini"), after=(tools.edit[0], tools.edited)),
            report("The speed is 4.", (shell, "speed = 4")),
        ),
        *task(f"{agent}-error", read, report("The speed is 3.", has_read, **fails_once)),
        *task(
            f"{agent}-command",
            call(run("expr 6 '*' 7"), run("wc -l < config.ini")),
            report("42 and 3.", (shell, "42")),
        ),
        *task(f"{agent}-kill", read, report(long_report, has_read, pace={"token-ms": 30})),
        *long_task(f"{agent}-long", tools, reload=reload, long_report=long_report),
        *task(
            f"{agent}-reload",
            call(run(reload)),
            call(run("cat config.ini"), after=(shell, "replaced")),
            report("The speed is still 3.", (shell, "speed = 3")),
        ),
    ]


STEPS = 20
"""Turns of the long task with a command, each of which writes a line into steps.txt."""
COMPACTED = "All steps are done, some before a summary."
"""The report of an agent that has compacted its conversation."""


def long_task(name: str, tools: Tools, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    """A task of many turns: the second streams for a while, in the eighth the API servers are replaced, and
    ten outputs are long. When the conversation is summarized is the agent's business: the summary names the
    last step."""

    def run(step: int) -> str:
        command = f"echo step-{step}. >> steps.txt; tail -n 1 steps.txt"
        if 2 < step < 13:
            command += "; seq -s ' ' 1 3000"
        return f"{reload}; {command}" if step == 8 else command

    def next_step(step: int) -> dict[str, Any]:
        calls = [{"name": tools.run(run(step))[0], "arguments": tools.run(run(step))[1]}]
        paced = {"pace": {"token-ms": 30}} if step == 2 else {}
        return {"reply": {"text": long_report if step == 2 else f"Step {step}.", "calls": calls}, **paced}

    rules = []
    for step in range(STEPS - 1, 0, -1):
        on = f"go on after step {step}."
        rules.append({"match": {"prompt": on, "last": "user"}, **next_step(step + 1)})
        asked = {"prompt": rf"(?s){name}\b.*step-{step}\.", "regex": "(?i)summar|snapshot"}
        rules.append({"match": asked, "reply": {"text": f"Work on {name}: {on}"}})
    rules.append({"match": {"prompt": rf"{name}\b", "last": "user"}, **next_step(1)})
    all_done = {"tool": tools.shell, "text": f"step-{STEPS}."}
    rules.append(
        {"match": {"prompt": rf"(?s){name}\b.*go on after", **all_done}, "reply": {"text": COMPACTED}}
    )
    for step in range(1, STEPS):
        done = {"prompt": rf"{name}\b", "tool": tools.shell, "text": f"step-{step}."}
        rules.append({"match": done, **next_step(step + 1)})
    return rules


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
