"""Claude Code: how it is run, and what the model does in its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agents.scripts import call, report, task

ARGUMENTS = (
    "--output-format=stream-json",
    "--verbose",
    "--dangerously-skip-permissions",
    "-p",
)
RESULT = '"type":"tool_result"'
"""In the event of a tool's result."""


def environ(url: str, key: str, home: Path) -> dict[str, str]:
    """The variables of docs/agents.md, and one that lets it run without a sandbox."""
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }


def report_of(events: list[dict[str, Any]]) -> str:
    """The result of the task."""
    return str(events[-1]["result"])


def rules(folder: Path, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    path = str(folder / "config.ini")

    def run(command: str) -> tuple[str, dict[str, Any]]:
        return "Bash", {"command": command, "description": "Run a command"}

    read = call(("Read", {"file_path": path}), text="I look.", reasoning="A file.")
    edit = {"file_path": path, "old_string": "speed = 3", "new_string": "speed = 4"}
    return [
        *task("claude-read", read, report("The speed is 3.", ("Read", "speed = 3"))),
        *task(
            "claude-edit",
            read,
            call(("Edit", edit), after=("Read", "speed = 3")),
            call(run("cat config.ini"), after=("Edit", "updated successfully")),
            report("The speed is 4.", ("Bash", "speed = 4")),
        ),
        *task(
            "claude-picture",
            call(("Read", {"file_path": str(folder / "pump.png")})),
            call(("Read", {"file_path": path}), after=("Read", "cannot see it")),
            report("Nobody sees the pump.", ("Read", "speed = 3")),
        ),
        *task(
            "claude-error",
            read,
            report(
                "The speed is 3.", ("Read", "speed = 3"), end="error", **{"after-tokens": 3, "end-times": 1}
            ),
        ),
        *task(
            "claude-command",
            call(run("echo $((6 * 7))"), run("wc -l < config.ini")),
            report("42 and 3.", ("Bash", "42")),
        ),
        *task("claude-kill", read, report(long_report, ("Read", "speed = 3"), pace={"token-ms": 30})),
        *task(
            "claude-reload",
            call(run(reload)),
            call(run("cat config.ini"), after=("Bash", "replaced")),
            report("The speed is still 3.", ("Bash", "speed = 3")),
        ),
    ]
