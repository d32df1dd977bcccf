"""opencode: how it is run, and what the model does in its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agents.scripts import Tools, tasks

ARGUMENTS = ("run", "--format", "json", "--model", "penstock/penstock-demo")
RESULT = '"type":"tool_use"'
"""In the event of a tool's result."""
CONFIG = """{
  "provider": {
    "penstock": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "Penstock",
      "options": {"baseURL": "{url}/v1", "apiKey": "{env:PENSTOCK_API_KEY}"},
      "models": {"penstock-demo": {"limit": {"context": 110000, "output": 8000}}}
    }
  },
  "small_model": "penstock/penstock-demo",
  "autoupdate": false,
  "share": "disabled"
}"""
"""The file ~/.config/opencode/opencode.json of docs/agents.md."""


def environ(url: str, key: str, home: Path) -> dict[str, str]:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "opencode.json").write_text(CONFIG.replace("{url}", url))
    return {"PENSTOCK_API_KEY": key, "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def report_of(events: list[dict[str, Any]]) -> str:
    """The last text of the model."""
    return str([each["part"]["text"] for each in events if each["type"] == "text"][-1])


def rules(folder: Path, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    path = str(folder / "config.ini")
    read = "read", {"filePath": path}
    edit = "edit", {"filePath": path, "oldString": "speed = 3", "newString": "speed = 4"}
    tools = Tools(read, edit, "success", "bash", "command", {"description": "Run a command"})
    title = {"match": {"prompt": "title generator"}, "reply": {"text": "A task"}}
    return [title, *tasks("opencode", tools, reload=reload, long_report=long_report)]
