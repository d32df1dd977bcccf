"""Structured output of the bundled model, over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import Streams
from tests.integration.server import SYNTHETIC, Server, data_of

pytest.importorskip("torch")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "line": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "line"],
    "additionalProperties": False,
}
DOCS = Path(__file__).parent.parent.parent / "docs"
EXAMPLES, TOOL_EXAMPLES = (
    re.findall(r"^```(python|bash)\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    for page in ("structured-output.md", "tools.md")
)
OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "256")
MESSAGES = [{"role": "user", "content": "Which function opens a file?"}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*OPTIONS, directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


def test_answers_match_whatever_the_seed(demo: Server) -> None:
    def answer(seed: int) -> dict[str, Any]:
        body = {"messages": MESSAGES, "max_tokens": 900, "seed": seed, "temperature": 1.2}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        reply = demo.post("/v1/chat/completions", body, timeout=90)
        assert reply.status_code == 200, reply.text
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(6) as pool:
        for choice in pool.map(answer, range(6)):
            assert choice["finish_reason"] == "stop"
            value = json.loads(choice["message"]["content"])
            assert value.keys() == {"name", "line"}
            assert len(value["name"]) <= 12
            assert 0 <= value["line"] <= 999


CALL = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ],
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_spends_its_tokens_on_the_call(demo: Server, choice: Any) -> None:
    def call(seed: int) -> dict[str, Any]:
        body = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 150, "seed": seed}
        body |= CALL | {"temperature": 1.5, "return_token_ids": True}
        reply = demo.post("/v1/chat/completions", body, timeout=90)
        found: dict[str, Any] = reply.raise_for_status().json()["choices"][0]
        return found

    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(call, range(6)):
            assert found["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")
            assert found["message"]["content"] is None
            [made] = found["message"]["tool_calls"]
            arguments = made["function"]["arguments"]
            assert set(json.loads(arguments)) <= {"city", "days"}
            outside = re.sub('"[^"]*"', '""', arguments)
            assert re.fullmatch(r"[^\s]( ?[^\s])*", outside), "at most one space between two parts"


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
@pytest.mark.parametrize("tokens", [3, 9])
def test_a_call_that_is_cut_is_no_content(demo: Server, choice: Any, tokens: int) -> None:
    body = CALL | {"tool_choice": choice, "max_tokens": tokens, "temperature": 0}
    whole = demo.post("/v1/chat/completions", body).raise_for_status().json()["choices"][0]
    assert whole["finish_reason"] == "length"
    message = whole["message"]
    assert not message["content"]
    events = data_of(demo.post("/v1/chat/completions", body | {"stream": True}).raise_for_status().text)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    calls = message.get("tool_calls") or []
    assert "".join(piece.get("arguments", "") for piece in pieces) == "".join(
        call["function"]["arguments"] for call in calls
    )


def test_choices_and_expressions_beside_free_text(demo: Server) -> None:
    free = {"max_tokens": 30, "temperature": 0}
    expected = demo.complete("Return the", **free)["choices"][0]["text"]

    def run(number: int) -> str:
        outputs = [None, {"choice": ["red", "green"]}, {"regex": "[a-c]{2,5}!"}][number % 3]
        if outputs is None:
            text: str = demo.complete("Return the", **free)["choices"][0]["text"]
            return text
        events = demo.stream("Return the", max_tokens=40, seed=number, structured_outputs=outputs)
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert choices[-1]["finish_reason"] == "stop"
        return "".join(choice["text"] for choice in choices)

    with ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(run, range(9)))
    assert texts[0::3] == [expected] * 3
    assert all(text in ("red", "green") for text in texts[1::3])
    assert all(re.fullmatch("[a-c]{2,5}!", text) for text in texts[2::3])


def test_an_ended_grammar_ends_the_stream_although_eos_is_ignored(demo: Server) -> None:
    reply = demo.complete("x", max_tokens=40, ignore_eos=True, structured_outputs={"choice": ["yes"]})
    assert reply["choices"][0]["text"] == "yes"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] < 40


def test_bad_grammars_are_the_clients_error(demo: Server) -> None:
    reply = demo.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[a"}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "structured_outputs.regex"


TOO_MANY = [f"value{number}" for number in range(30_000)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_field_of_a_grammar_that_an_engine_refuses_is_named(demo: Server, stream: bool) -> None:
    body = {"prompt": "x", "stream": stream, "structured_outputs": {"json": {"enum": TOO_MANY}}}
    reply = demo.post("/v1/completions", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "structured_outputs.json"
    message = reply.json()["error"]["message"]
    assert message.startswith(
        "structured output (structured_outputs.json): the grammar is too large: its texts "
    )


def test_the_synthetic_engine_says_that_it_cannot(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Server(*SYNTHETIC, directory=tmp_path_factory.mktemp("synthetic")) as server:
        reply = server.post("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}})
        assert reply.status_code == 400
        assert "structured output" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "response_format"
        wrong = {"prompt": "x", "structured_outputs": {"regex": "[a"}}
        assert (
            "synthetic engine" in server.post("/v1/completions", wrong).text
        )  # no time is spent on its check
        assert reply.json()["error"]["type"] == "BadRequestError"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_streams_of_a_killed_engine_go_on_within_their_grammars(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pattern = "([a-f][0-9]){100}"
    bodies = [
        {"prompt": "x", "seed": seed, "max_tokens": 250, "structured_outputs": {"regex": pattern}}
        for seed in range(4)
    ]
    options = (*OPTIONS, "--data-parallel-size", "2")
    with (
        Server(*options, directory=tmp_path_factory.mktemp("pair")) as pair,
        Streams(pair.url, bodies) as streams,
    ):
        streams.until_each_has(3)
        pair.children("engine")[0].kill()
        streams.until_all_ended()
        assert streams.failures == []
        assert all(re.fullmatch(pattern, text) for text in streams.texts)
        assert pair.metric("penstock:streams_interrupted_total", outcome="resumed") > 0


def run_example(demo: Server, language: str, example: str) -> str:
    """What an example of the docs prints."""
    command = [sys.executable, "-c"] if language == "python" else ["bash", "-c"]
    if language == "bash" and not shutil.which("curl"):
        pytest.skip("no curl")
    text = example.replace("http://localhost:8000", demo.url)
    ran = subprocess.run([*command, text], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(("language", "example"), EXAMPLES)
def test_the_examples_of_the_page_run(demo: Server, language: str, example: str) -> None:
    printed = run_example(demo, language, example)
    if language == "bash":
        choice = json.loads(printed)["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        assert re.match(r" (blue|grey)$|[0-9]", choice["text"])
    else:
        assert re.search("True|False|[0-9]", printed)


@pytest.mark.parametrize(("language", "example"), TOOL_EXAMPLES)
def test_the_example_of_the_page_about_tools_runs(demo: Server, language: str, example: str) -> None:
    choice = json.loads(run_example(demo, language, example))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert len(json.loads(call["function"]["arguments"])["city"]) <= 20
