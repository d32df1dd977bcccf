"""Conversations that are compacted at one API server and go on at another, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dialects.responses.reading import events_of
from tests.integration.server import TLS, Server

SCRIPT = """
rules:
- match: {text: "under these headings"}
  reply: {reasoning: "Everything.", text: "Goal: find the speed. It is 3."}
- match: {prompt: "It is 3", text: "How fast"}
  reply: {text: "As I noted: 3."}
- reply: {text: "I do not know."}
"""
ASK = {"role": "user", "content": "How fast is it?"}
WORK: list[dict[str, Any]] = [
    {"role": "user", "content": "Look at the file."},
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "speed = 3"},
]
TRIGGER = {"type": "compaction_trigger"}
MINE, OTHER = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Server]:
    script = directory / "script.yaml"
    script.write_text(SCRIPT)
    scripted = ("--engine", "synthetic", "--synthetic-script", str(script), "--synthetic-step-ms", "1")
    keys = ("--api-key", "mine", "--api-key", "other", "--reasoning-parser", "think")
    store = ("--response-store-dir", str(directory / "responses"))
    with Server(*scripted, *keys, *store, *options, directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compaction")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--api-server-count", "2") as running:
        yield running


@pytest.fixture
def connections(server: Server) -> Iterator[list[httpx.Client]]:
    """One to each API server: a new one goes to that with the fewest."""
    clients = [httpx.Client(base_url=server.url, headers=MINE, timeout=60, verify=TLS) for _ in range(2)]
    for client in clients:
        client.get("/health").raise_for_status()
    yield clients
    for client in clients:
        client.close()


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["output"][-1]["content"][0]["text"])


def test_a_compacted_conversation_goes_on_at_another_api_server(connections: list[httpx.Client]) -> None:
    one, other = connections
    reply = one.post("/v1/responses/compact", json={"input": WORK, "model": "penstock-demo"})
    assert reply.status_code == 200, reply.text
    output, usage = reply.json()["output"], reply.json()["usage"]
    assert [item["type"] for item in output] == ["message", "compaction"]
    assert usage["input_tokens"] > 100
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    asked = {"input": [*output, ASK], "store": False}
    for client in connections:
        assert text_of(client.post("/v1/responses", json=asked)) == "As I noted: 3."
    counted = other.post("/v1/responses/input_tokens", json=asked).json()["input_tokens"]
    used = other.post("/v1/responses", json=asked).json()["usage"]["input_tokens"]
    assert counted == used
    refused = other.post("/v1/responses", json=asked, headers=OTHER)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].encrypted_content")


def test_a_trigger_in_a_stored_conversation(connections: list[httpx.Client]) -> None:
    one, other = connections
    first = one.post("/v1/responses", json={"input": WORK}).json()
    stream = {"input": [TRIGGER], "previous_response_id": first["id"], "stream": True}
    events = events_of(other.post("/v1/responses", json=stream).text)
    assert [event["type"] for event in events][-2:] == ["response.output_item.done", "response.completed"]
    compacted = events[-1]["response"]
    assert [item["type"] for item in compacted["output"]] == ["compaction"]
    after = {"input": [ASK], "previous_response_id": compacted["id"]}
    assert text_of(one.post("/v1/responses", json=after)) == "As I noted: 3."
    shown = one.get(f"/v1/responses/{compacted['id']}").json()
    assert shown["output"] == compacted["output"]


def test_items_outlive_the_server(folder: Path, tmp_path: Path, server: Server) -> None:
    """The key is kept beside the stored responses, which another server of the host shares."""
    with httpx.Client(base_url=server.url, headers=MINE, timeout=60, verify=TLS) as client:
        output = client.post("/v1/responses/compact", json={"input": WORK}).json()["output"]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Say what matters.")
    later = ("--response-store-dir", str(folder / "responses"), "--compaction-prompt-file", str(prompt))
    with (
        serving(tmp_path, *later) as second,
        httpx.Client(base_url=second.url, headers=MINE, timeout=60) as client,
    ):
        assert text_of(client.post("/v1/responses", json={"input": [*output, ASK]})) == "As I noted: 3."
        asked = client.post("/v1/responses/compact", json={"input": [*output, ASK]})
        assert asked.status_code == 200


def threshold(tokens: int) -> list[dict[str, Any]]:
    return [{"type": "compaction", "compact_threshold": tokens}]


def test_a_long_conversation_is_compacted_and_goes_on(connections: list[httpx.Client]) -> None:
    one, other = connections
    asked = {"input": [*WORK, ASK], "store": True, "context_management": threshold(20)}
    whole = one.post("/v1/responses", json=asked).json()
    assert [item["type"] for item in whole["output"]] == ["compaction", "message"]
    assert whole["output"][1]["content"][0]["text"] == "As I noted: 3."
    events = events_of(other.post("/v1/responses", json=asked | {"stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events[:6]] == [
        "created",
        "in_progress",
        "output_item.added",
        "compaction.compacting",
        "output_item.done",
        "output_item.added",
    ]
    assert events[0]["response"]["output"] == []
    assert [events[4]["output_index"], events[5]["output_index"]] == [0, 1]
    final = events[-1]["response"]
    assert final["output"][0] == events[4]["item"]
    assert [item["type"] for item in final["output"]] == ["compaction", "message"]
    assert final["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    after = {"input": [ASK], "previous_response_id": final["id"], "context_management": threshold(10_000)}
    reply = one.post("/v1/responses", json=after)
    assert text_of(reply) == "As I noted: 3."
    assert [item["type"] for item in reply.json()["output"]] == ["message"]
    again = {"input": [*WORK, ASK, *final["output"], ASK]}
    assert text_of(one.post("/v1/responses", json=again)) == "As I noted: 3."


def test_a_conversation_beyond_the_context_is_compacted(connections: list[httpx.Client]) -> None:
    long = [*WORK[:2], {**WORK[2], "output": "word " * 40_000}, ASK]
    refused = connections[0].post("/v1/responses", json={"input": long})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    reply = connections[0].post("/v1/responses", json={"input": long, "context_management": threshold(1000)})
    assert text_of(reply) == "As I noted: 3."


def test_what_a_context_management_may_be(connections: list[httpx.Client]) -> None:
    def param(given: Any) -> str:
        reply = connections[0].post("/v1/responses", json={"input": "a", "context_management": given})
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["param"])

    assert param({}) == "context_management"
    assert param([{}]) == "context_management[0]"
    assert param([{"type": "x"}]) == "context_management[0].type"
    assert param(threshold(0)) == "context_management[0].compact_threshold"
