"""The cases of llm-comply, a suite that checks replies by the schemas of each API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from llm_comply.schema import SpecLoader

from tests.clients.conftest import PYTHON
from tests.gateway.processes import gateway
from tests.integration.server import Server

SCRIPT = {
    "rules": [
        {
            "match": {"text": "weather in San Francisco"},
            "reply": {"calls": [{"name": "get_weather", "arguments": {"location": "San Francisco"}}]},
        },
        {"match": {"text": "15 * 37"}, "reply": {"reasoning": "10 * 37 and 5 * 37.", "text": "It is 555."}},
        {"reply": {"text": "One two three."}},
    ]
}
SUITES = {
    "openai-chat": ("/v1", "gpt-5", 9),
    "anthropic": ("/v1", "claude-opus", 9),
    "open-responses": ("/v1", "gpt-5", 13),
    "google-genai": ("", "gpt-5", 9),
}
"""The path, a name of a model for which no case is left out, and the number of cases."""


@pytest.fixture(scope="module", params=["direct", "gateway"])
def strict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("conformance")
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    scripted = ("--engine", "synthetic", "--synthetic-script", str(script), "--reasoning-parser", "think")
    aliases = ("--model-alias", "gpt-*=penstock-demo", "--model-alias", "claude-*=penstock-demo")
    with Server(*scripted, *aliases, "--strict-schema", directory=directory, python=PYTHON) as running:
        if request.param == "direct":
            yield running.url
            return
        with gateway(running.url, python=PYTHON) as front:
            yield front.url


@pytest.mark.parametrize("api", SUITES)
def test_every_case_passes(strict: str, api: str) -> None:
    path, model, cases = SUITES[api]
    report = comply(strict + path, model, api)
    found = {
        result["id"]: [*result.get("errors", []), *result.get("warnings", [])] for result in report["results"]
    }
    assert {name: said for name, said in found.items() if said} == {}
    assert report["summary"] == {"total": cases, "passed": cases, "failed": 0, "skipped": 0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("question", "kind"), [("the weather in San Francisco", "function_call"), ("15 * 37", "reasoning")]
)
def test_streams_of_responses_are_as_the_specification_has_them(
    strict: str, question: str, kind: str
) -> None:
    """The suite streams no calls, and no reasoning: its events have OpenAI's names, which the specification
    shortens."""
    specification = SpecLoader(str(files("llm_comply") / "specs" / "openresponses.json"))
    parameters = {"type": "object", "properties": {"location": {"type": "string"}}}
    tool = {"type": "function", "name": "get_weather", "parameters": parameters}
    body = {"model": "gpt-5", "input": f"Tell me {question}.", "tools": [tool], "stream": True}
    lines = httpx.post(f"{strict}/v1/responses", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    for event in events:
        name = event["type"].replace("response.reasoning_text.", "response.reasoning.")
        assert specification.validate_sse_event(name, event | {"type": name}) == []
    assert specification.validate(events[-1]["response"], "ResponseResource") == []
    assert events[-1]["response"]["output"][0]["type"] == kind


def comply(url: str, model: str, api: str) -> Any:
    """The report of a run."""
    program = Path(sys.executable).with_name("llm-comply")
    options = ("--base-url", url, "--api-key", "none", "--model", model, "--format", api, "--json")
    run = subprocess.run([program, *options], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout, run.stderr
    return json.loads(run.stdout)
