"""Qwen Code: how it is run, and what the model does in its tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.scripts import Tools, tasks

ARGUMENTS = ("--auth-type", "openai", "--yolo", "--output-format", "stream-json", "--prompt")
RESULT = '"type":"tool_result"'
"""In the event of a tool's result."""


def environ(url: str, key: str, home: Path) -> dict[str, str]:
    """The variables of docs/agents.md, one that lets it run without a warning, and a context of which it
    compacts what is in it."""
    (home / ".qwen").mkdir(exist_ok=True)
    settings = {"model": {"generationConfig": {"contextWindowSize": 110_000}}}
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": "penstock-demo",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }


def report_of(events: list[dict[str, Any]]) -> str:
    """The result of the task."""
    return str(events[-1]["result"])


def rules(folder: Path, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    path = str(folder / "config.ini")
    read = "read_file", {"file_path": path}
    edit = "edit", {"file_path": path, "old_string": "speed = 3", "new_string": "speed = 4"}
    waits = "; sleep 0.3"  # it loses the output of a command that ends at once, now and then
    foreground = {"is_background": False}
    tools = Tools(read, edit, "has been updated", "run_shell_command", "command", foreground, waits)
    return tasks("qwen", tools, reload=reload, long_report=long_report)
