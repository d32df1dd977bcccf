"""Codex: how it is run, and what the model does in its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agents.scripts import Tools, call, report, task, tasks

ARGUMENTS = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
RESULT = '"exit_code":0'
"""In the event of a tool's result."""
CONFIG = """
model = "penstock-demo"
model_provider = "penstock"

[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "PENSTOCK_API_KEY"
"""
"""The file ~/.codex/config.toml of docs/agents.md."""
CATALOG: dict[str, Any] = {
    "slug": "penstock-demo",
    "display_name": "Penstock demo",
    "description": "A model that follows a script.",
    "base_instructions": "You are a coding agent.",
    "context_window": 200_000,
    "apply_patch_tool_type": "freeform",
    "shell_type": "shell_command",
    "input_modalities": ["text"],
    "supports_parallel_tool_calls": True,
    "supports_reasoning_summaries": True,
    "support_verbosity": False,
    "default_reasoning_level": "medium",
    "supported_reasoning_levels": [{"effort": "medium", "description": "Medium"}],
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "experimental_supported_tools": [],
    "supported_in_api": True,
    "visibility": "list",
    "priority": 1,
}
"""The model in the catalog of docs/agents.md."""
COMPACTS = {
    "model_providers.penstock.name": '"OpenAI"',
    "features.remote_compaction_v2": "true",
    "model_context_window": "200000",
    "model_auto_compact_token_limit": "40000",
}
"""Settings of docs/agents.md with which the server writes summaries, at a limit that a test reaches."""
PATCH = """*** Begin Patch
*** Update File: config.ini
@@
-speed = 3
+speed = 4
*** End Patch
"""


def environ(url: str, key: str, home: Path) -> dict[str, str]:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(CONFIG.format(url=url))
    return {"PENSTOCK_API_KEY": key}


def report_of(events: list[dict[str, Any]]) -> str:
    """The last message of the agent."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return str([item["text"] for item in items if item["type"] == "agent_message"][-1])


def rules(folder: Path, *, reload: str, long_report: str) -> list[dict[str, Any]]:
    shell = "exec_command"
    read = shell, {"cmd": "cat config.ini"}
    edit = shell, {"cmd": f"apply_patch <<'EOF'\n{PATCH}EOF\n"}
    tools = Tools(read, edit, "Success", shell, "cmd")
    return [
        *tasks("codex", tools, reload=reload, long_report=long_report),
        *task(
            "codex-patch",
            call(read),
            call(("apply_patch", {"input": PATCH}), after=(shell, "speed = 3")),
            report("The speed is 4.", ("apply_patch", "Success")),
        ),
    ]
