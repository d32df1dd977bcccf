"""Greedy replies of vLLM 0.32, recorded on a tiny random model in float32, against the torch engine.

The model's weights are too large to keep here: TEST_TINY_LLAMA names their directory.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .server import Server, data_of

CASES = json.loads((Path(__file__).parent.parent / "data" / "golden_greedy.json").read_text())
MODEL = os.environ.get("TEST_TINY_LLAMA", "")
IGNORED = {"id", "created", "system_fingerprint", "prompt_tokens_details"}

pytestmark = pytest.mark.skipif(not MODEL, reason="TEST_TINY_LLAMA names no model")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--seed",
        "0",
        "--served-model-name",
        "tiny-llama",
    )
    with Server(MODEL, *options, directory=tmp_path_factory.mktemp("golden")) as running:
        yield running


def plain(value: Any) -> Any:
    """A reply without what varies and without nulls, which Penstock leaves out."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if part is not None and key not in IGNORED}
    return [plain(part) for part in value] if isinstance(value, list) else value


def near(value: Any) -> Any:
    """The same with floats that equal their neighbours."""
    if isinstance(value, dict):
        return {key: near(part) for key, part in value.items()}
    if isinstance(value, list):
        return [near(part) for part in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def gathered(events: list[str]) -> dict[str, Any]:
    """What a stream's events say together, by choice: how they are cut is not compared."""
    whole: dict[str, Any] = {"done": events[-1] == "[DONE]"}
    for event in map(json.loads, events[:-1]):
        for key in ("usage", "prompt_token_ids"):
            if event.get(key) is not None:
                whole[key] = event[key]
        for choice in event["choices"]:
            parts = whole.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": {}})
            parts["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            parts["ids"] += choice.get("token_ids") or []
            for key, values in (choice.get("logprobs") or {}).items():
                parts["logprobs"].setdefault(key, []).extend(values)
            for key in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if choice.get(key) is not None:
                    parts[key] = choice[key]
    return whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_greedy_replies_are_those_of_vllm(server: Server, case: dict[str, Any]) -> None:
    reply = server.post(case["path"], case["request"])
    assert reply.status_code == 200
    if case["request"].get("stream"):
        theirs, ours = gathered(data_of(case["reply"])), gathered(data_of(reply.text))
    else:
        theirs, ours = case["reply"], reply.json()
    assert plain(ours) == near(plain(theirs))
