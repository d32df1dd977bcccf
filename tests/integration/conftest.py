"""Servers that several tests share; a test that kills parts or ends one starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.integration.attached_vllm import AttachedVllm
from tests.integration.golden import write_model
from tests.integration.server import SYNTHETIC, VLLM_START_S, Server, in_vllm


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The synthetic engine under the bundled tokenizer; its model is called m."""
    with Server(*SYNTHETIC, directory=tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The torch engine on the model of the recorded replies; its model is called tiny-llama."""
    model = tmp_path_factory.mktemp("tiny-llama")
    write_model(model)
    options = ("--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "tiny-llama")
    with Server(
        str(model), *options, "--threads", "1", directory=tmp_path_factory.mktemp("golden")
    ) as running:
        yield running


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the recorded replies, for vLLM; what asks for it is skipped where there is no vLLM."""
    pytest.importorskip("vllm", reason="make test-vllm makes an environment with vLLM")
    model = tmp_path_factory.mktemp("tiny-llama")
    write_model(model)
    return model


@pytest.fixture(scope="session")
def tiny_llama_in_vllm(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's engine, which the server starts, on the model of the recorded replies, called tiny-llama."""
    directory = tmp_path_factory.mktemp("vllm")
    with Server(*in_vllm(vllm_model), directory=directory, start_s=VLLM_START_S) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_llama_attached(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same in a headless engine of vLLM's, attached."""
    with AttachedVllm(*in_vllm(vllm_model), directory=tmp_path_factory.mktemp("attached")) as running:
        yield running


@pytest.fixture(params=["tiny_llama_in_vllm", "tiny_llama_attached"], ids=["started", "attached"])
def vllm_server(request: pytest.FixtureRequest) -> Server:
    """vLLM's engine on the model of the recorded replies, in either way."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
