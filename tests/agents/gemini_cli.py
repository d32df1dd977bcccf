"""gemini-cli: how it is run, and what the model does in its tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.scripts import Tools, tasks

ARGUMENTS = (
    "--model",
    "penstock-demo",
    "--yolo",
    "--skip-trust",
    "--output-format",
    "stream-json",
    "--prompt",
)
RESULT = '"type":"tool_result"'
"""In the event of a tool's result."""


def environ(url: str, key: str, home: Path) -> dict[str, str]:
    """The variables of docs/agents.md, and settings that keep it from other hosts."""
    (home / ".gemini").mkdir(exist_ok=True)
    settings = {
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
    }
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    return {"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": key}


def report_of(events: list[dict[str, Any]]) -> str:
    """What the model said after the last result of a tool."""
    last = max((number for number, each in enumerate(events) if each["type"] == "tool_result"), default=0)
    said = [each for each in events[last:] if each["type"] == "message" and each["role"] == "assistant"]
    return "".join(each["content"] for each in said)


def rules(folder: Path, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    path = str(folder / "config.ini")
    read = "read_file", {"file_path": path}
    replaced = {"old_string": "speed = 3", "new_string": "speed = 4", "instruction": "Set the speed to 4."}
    edit = "replace", {"file_path": path, **replaced}
    tools = Tools(read, edit, "Successfully modified", "run_shell_command", "command")
    return tasks("gemini", tools, reload=reload, long_report=long_report)
