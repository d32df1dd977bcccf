"""One server with the demo model for all clients, met directly and through a gateway.

The clients bring what the server does not need, and exclude each other's versions: `make test-clients`
installs them in environments of their own, one per major version of the openai package. Without them nothing
here is collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.scripted import SCRIPT
from tests.gateway.processes import gateway
from tests.integration.server import Server

ROOT = Path(__file__).parent.parent.parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
"""The interpreter that has the server's own packages."""
NEEDED = {
    "test_openai.py": "openai",
    "test_node.py": "openai",
    "test_anthropic.py": "anthropic",
    "test_langchain.py": "langchain_openai",
    "test_pydantic_ai.py": "pydantic_ai",
    "test_agents.py": "agents",
    "test_llm.py": "llm",
    "test_litellm.py": "litellm",
    "test_instructor.py": "instructor",
    "test_llama_index.py": "llama_index",
    "test_dspy.py": "dspy",
    "test_tool_rounds.py": "openai",
    "test_ollama.py": "ollama",
    "test_gemini.py": "google.genai",
    "test_conformance.py": "llm_comply",
    "test_frameworks.py": "langgraph",
    "test_images.py": "google.genai",
    "test_vectors.py": "cohere",
    "test_vectors_openai2.py": "llama_index.embeddings.text_embeddings_inference",
}
"""The package that each file of tests needs."""
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "AGNO_TELEMETRY": "false",
}
"""What keeps clients from other hosts."""


def installed(package: str) -> bool:
    """``find_spec`` raises where the package around it is absent."""
    return bool(find_spec(package.partition(".")[0]) and find_spec(package))


if any(map(find_spec, ("anthropic", "langchain_openai", "litellm"))):
    os.environ.update(OFFLINE)
    collect_ignore = [file for file, package in NEEDED.items() if not installed(package)]
else:
    collect_ignore = list(NEEDED)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(directory=tmp_path_factory.mktemp("demo"), python=PYTHON) as running:
        yield running


@pytest.fixture(scope="session", params=["direct", "gateway"])
def url(
    demo: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Base URL of the API: of the server, of a gateway in front of it, and of one for which the server speaks
    chat completions alone."""
    if request.param == "direct":
        yield f"{demo.url}/v1"
        return
    if request.param == "translated":
        pools = tmp_path_factory.mktemp("translated") / "endpoints.yaml"
        pools.write_text(f"pools:\n- {{name: chat, endpoints: ['{demo.url}'], apis: [chat]}}\n")
        with gateway(options=("--endpoints-file", str(pools)), python=PYTHON) as front:
            yield f"{front.url}/v1"
        return
    with gateway(demo.url, python=PYTHON) as front:
        yield f"{front.url}/v1"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose model follows a script, behind a gateway."""
    directory = tmp_path_factory.mktemp("scripted")
    script = directory / "script.json"
    script.write_text(SCRIPT)
    options = ("--engine", "synthetic", "--synthetic-script", str(script), "--reasoning-parser", "think")
    with (
        Server(*options, directory=directory, python=PYTHON) as running,
        gateway(running.url, python=PYTHON) as front,
    ):
        yield front.url


@pytest.fixture(scope="session")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--engine", "synthetic", "--runner", "pooling", "--synthetic-dimensions", "64")
    with Server(*options, directory=tmp_path_factory.mktemp("vectors"), python=PYTHON) as running:
        yield running


@pytest.fixture(scope="session", params=["direct", "gateway"])
def vectors(pooling: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server of vectors and scores, and of a gateway in front of it, without a path."""
    if request.param == "direct":
        yield pooling.url
        return
    with gateway(pooling.url, python=PYTHON) as front:
        yield front.url
