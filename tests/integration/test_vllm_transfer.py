"""kv_transfer_params to and from a connector in vLLM's engine, behind a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.attached_vllm import AttachedVllm
from tests.integration.server import VLLM_START_S, Server, in_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

class Echo(ExampleConnector):
    def request_finished(self, request, block_ids):
        asked = request.kv_transfer_params
        return False, asked and {"asked": asked, "blocks": len(block_ids), "path": self._storage_path}
"""
"""vLLM's example, which keeps KV caches in files; this one also says what it was asked for."""
PARAMS = {"do_remote_decode": True, "remote": {"host": "h", "ids": [1, 2]}, "large": (1 << 63) - 1}
BODY: dict[str, Any] = {"prompt": "The with statement", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module", params=[Server, AttachedVllm], ids=["started", "attached"])
def server(
    request: pytest.FixtureRequest, vllm_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("transfer")
    (directory / "echo_connector.py").write_text(CONNECTOR)
    environ = os.environ | {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}
    config = {
        "kv_connector": "Echo",
        "kv_connector_module_path": "echo_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "kv")},
    }
    arguments = in_vllm(vllm_model, own=("--kv-transfer-config", json.dumps(config)))
    kind: type[Server] = request.param
    with kind(*arguments, directory=directory, environ=environ, start_s=VLLM_START_S) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_was_asked_for_reaches_the_connector_and_its_answer_the_reply(server: Server, path: str) -> None:
    body = BODY | {"kv_transfer_params": PARAMS, "messages": [{"role": "user", "content": "hi"}]}
    del body["prompt" if "chat" in path else "messages"]
    whole = server.post(path, body).raise_for_status().json()
    assert whole["kv_transfer_params"]["asked"] == PARAMS
    assert whole["kv_transfer_params"]["blocks"] > 0
    streamed = server.post(path, body | {"stream": True}).raise_for_status().text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [event.get("kv_transfer_params", {}).get("asked") for event in events] == [
        *[None] * (len(events) - 1),
        PARAMS,
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_without_them_nothing_is_said(server: Server) -> None:
    assert server.complete(**BODY)["kv_transfer_params"] is None


def test_without_a_connector_they_are_refused_by_name(vllm_server: Server) -> None:
    refused = vllm_server.post("/v1/completions", BODY | {"kv_transfer_params": PARAMS})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
