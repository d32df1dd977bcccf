"""Tasks that unmodified agents finish: Codex over /v1/responses, Claude Code over /v1/messages, opencode and
Qwen Code over /v1/chat/completions, gemini-cli over /v1beta/models."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest

from tests.agents.codex import CATALOG, COMPACTS
from tests.agents.conftest import BIN, CONFIG, LONG_REPORT, TRANSLATED, Agent, metric
from tests.agents.scripts import COMPACTED, STEPS

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WEBSOCKET = ("-c", "model_providers.penstock.supports_websockets=true")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BIN.exists(), reason="make test-agents installs the agents"),
]


def test_read_a_file(agent: Agent) -> None:
    assert agent.run(f"{agent.name}-read") == "The speed is 3."


def test_edit_a_file(agent: Agent) -> None:
    assert agent.run(f"{agent.name}-edit") == "The speed is 4."
    assert (agent.folder / "config.ini").read_text() == CONFIG.replace("3", "4")


def test_run_two_commands_at_once(agent: Agent) -> None:
    assert agent.run(f"{agent.name}-command") == "42 and 3."


@pytest.mark.parametrize("agent", ["claude"], indirect=True)
def test_a_picture_is_seen(agent: Agent) -> None:
    """Read by a tool, and sent again with every turn that follows: it is prepared once."""
    (agent.folder / "pump.png").write_bytes(base64.b64decode(PIXEL))
    before = metric(agent.server, "penstock:media_images_total")
    assert agent.run("claude-picture") == "The pump is seen."
    assert metric(agent.server, "penstock:media_images_total") >= before + 2


@pytest.mark.parametrize("agent", ["claude"], indirect=True)
def test_a_wrong_key_is_told_at_once(agent: Agent) -> None:
    """It repeats other requests for minutes."""
    agent.environ["ANTHROPIC_AUTH_TOKEN"] = "wrong"
    with pytest.raises(AssertionError, match="The API key is not valid") as raised:
        agent.run("claude-read")
    assert "api_retry" not in str(raised.value)


@pytest.mark.parametrize("agent", ["codex", "claude", "opencode"], indirect=True)
def test_a_reply_that_fails_is_asked_for_again(agent: Agent) -> None:
    """Each of the engines fails once. Qwen Code gives up after the first token."""
    assert agent.run(f"{agent.name}-error") == "The speed is 3."


def test_an_engine_is_killed_in_mid_stream(agent: Agent, kill_busy_engine: Callable[[], None]) -> None:
    resumed = metric(agent.server, "penstock:streams_interrupted_total", outcome="resumed")
    assert agent.run(f"{agent.name}-kill", after_result=kill_busy_engine) == LONG_REPORT
    assert metric(agent.server, "penstock:streams_interrupted_total", outcome="resumed") == resumed + 1


def test_the_api_server_is_replaced_between_turns(agent: Agent) -> None:
    before = {process.pid for process in agent.server.children("api-server")}
    assert agent.run(f"{agent.name}-reload") == "The speed is still 3."
    assert not before & {process.pid for process in agent.server.children("api-server")}


@pytest.mark.parametrize("task", ["read", "edit", "command", "error", "kill", "reload"])
@pytest.mark.parametrize("agent", ["codex"], indirect=True)
def test_codex_over_a_websocket(agent: Agent, task: str, kill_busy_engine: Callable[[], None]) -> None:
    """It prepares the prompt, then makes its responses on one connection, each with what is new."""
    wanted = {"edit": "The speed is 4.", "command": "42 and 3.", "kill": LONG_REPORT}
    wanted |= {"reload": "The speed is still 3."}
    before = agent.server.log.count("status=101")
    posted = agent.server.log.count("method=POST path=/v1/responses")
    after = kill_busy_engine if task == "kill" else lambda: None
    report = agent.run(f"codex-{task}", *WEBSOCKET, after_result=after)
    assert report == wanted.get(task, "The speed is 3.")
    assert agent.server.log.count("status=101") > before
    assert agent.server.log.count("method=POST path=/v1/responses") > posted


@pytest.mark.parametrize("agent", TRANSLATED, indirect=True)
def test_twenty_turns_a_compaction_a_killed_engine_and_replaced_api_servers(
    agent: Agent, kill_busy_engine: Callable[[], None]
) -> None:
    """The client summarizes."""
    options = ("-c", "model_auto_compact_token_limit=40000") if agent.name == "codex" else ()
    _long_task(agent, kill_busy_engine, *options)


@pytest.mark.parametrize("options", [(), WEBSOCKET], ids=["http", "websocket"])
@pytest.mark.parametrize("agent", ["codex"], indirect=True)
def test_twenty_turns_and_the_server_compacts(
    agent: Agent, kill_busy_engine: Callable[[], None], options: tuple[str, ...]
) -> None:
    compacts = [part for name, value in COMPACTS.items() for part in ("-c", f"{name}={value}")]
    _long_task(agent, kill_busy_engine, *compacts, *options)


def _long_task(agent: Agent, kill_busy_engine: Callable[[], None], *options: str) -> None:
    """Each step is done once, and the last reply has read the summary."""
    steps = agent.folder / "steps.txt"
    steps.unlink(missing_ok=True)
    assert agent.run(f"{agent.name}-long", *options, after_result=kill_busy_engine) == COMPACTED
    assert steps.read_text().split() == [f"step-{step}." for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("agent", ["codex"], indirect=True)
def test_a_patch_as_text_under_a_grammar(agent: Agent) -> None:
    """Codex has a freeform tool for models of which it knows that they can write patches."""
    assert _patch(agent) == "The speed is 4."
    assert (agent.folder / "config.ini").read_text() == CONFIG.replace("3", "4")


@pytest.mark.parametrize("task", ["read", "edit", "command", "error"])
def test_through_a_gateway_that_translates(translated_agent: Agent, task: str) -> None:
    """To a server that speaks chat completions alone, as far as the gateway knows."""
    agent = translated_agent
    if (agent.name, task) == ("qwen", "error"):
        pytest.skip("Qwen Code gives up")
    wanted = {"read": "The speed is 3.", "edit": "The speed is 4.", "command": "42 and 3."}
    assert agent.run(f"{agent.name}-{task}") == wanted.get(task, "The speed is 3.")
    if task == "edit":
        assert (agent.folder / "config.ini").read_text() == CONFIG.replace("3", "4")


@pytest.mark.parametrize("translated_agent", ["codex"], indirect=True)
def test_a_patch_as_text_through_a_gateway_that_translates(translated_agent: Agent) -> None:
    report = _patch(translated_agent)
    assert report == "The speed is 4."
    assert (translated_agent.folder / "config.ini").read_text() == CONFIG.replace("3", "4")


def _patch(agent: Agent) -> str:
    """Codex's report of the task for which it has a freeform tool."""
    catalog = agent.folder.parent / "catalog.json"
    catalog.write_text(json.dumps({"models": [CATALOG]}))
    return agent.run("codex-patch", "-c", f'model_catalog_json="{catalog}"', "-c", 'web_search="disabled"')
