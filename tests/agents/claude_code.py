"""Claude Code: how it is run, and what the model does in its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agents.scripts import Tools, call, report, task, tasks

ARGUMENTS = (
    "--output-format=stream-json",
    "--verbose",
    "--dangerously-skip-permissions",
    "-p",
)
RESULT = '"type":"tool_result"'
"""In the event of a tool's result."""


def environ(url: str, key: str, home: Path) -> dict[str, str]:
    """The variables of docs/agents.md, one that lets it run without a sandbox, and one with which it compacts
    conversations."""
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
    }


def report_of(events: list[dict[str, Any]]) -> str:
    """The result of the task."""
    return str(events[-1]["result"])


def rules(folder: Path, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    path = str(folder / "config.ini")
    read = "Read", {"file_path": path}
    edit = "Edit", {"file_path": path, "old_string": "speed = 3", "new_string": "speed = 4"}
    described = {"description": "Run a command"}
    tools = Tools(read, edit, "updated successfully", "Bash", "command", described)
    return [
        *tasks("claude", tools, reload=reload, long_report=long_report),
        *task(
            "claude-picture",
            call(("Read", {"file_path": str(folder / "pump.png")})),
            {
                **call(read),
                "match": {"tool": "Read", "regex": r"^\s*$"},
            },  # the picture alone, which is no text
            report("The pump is seen.", ("Read", "speed = 3")),
        ),
    ]
