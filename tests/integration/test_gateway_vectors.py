"""Vectors of a real server through a gateway: what clients get directly, counted as the server counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load

from tests.gateway.processes import WAIT_S, Gateway, eventually, gateway
from tests.gateway.test_vectors import entry_of
from tests.integration.server import Server

WIDTH = 64
OPTIONS = ("--engine", "synthetic", "--runner", "pooling", "--synthetic-dimensions", str(WIDTH))
MODEL = "penstock-demo"
TEXTS = ["What is a vector?", "A row of a matrix.", "Something else"]
SEARCH = {"query": TEXTS[0], "documents": TEXTS[1:]}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": TEXTS},
    "/pooling": {"input": TEXTS},
    "/v2/embed": {"texts": TEXTS, "input_type": "search_query", "embedding_types": ["float"]},
    "/embed": {"inputs": TEXTS},
    "/api/embed": {"input": TEXTS},
    "/v1beta/models/penstock-demo:embedContent": {"content": {"parts": [{"text": TEXTS[0]}]}},
    "/v1/rerank": SEARCH,
    "/v2/rerank": SEARCH,
    "/score": {"text_1": TEXTS[0], "text_2": TEXTS[1:]},
    "/classify": {"input": TEXTS},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*OPTIONS, directory=tmp_path_factory.mktemp("vectors")) as made:
        yield made


@pytest.fixture(scope="module")
def front(server: Server) -> Iterator[Gateway]:
    with gateway(server.url) as made:
        yield made


def ask(url: str, path: str, **headers: str) -> httpx.Response:
    body = {"model": MODEL, **REQUESTS[path]}
    return httpx.post(url + path, json=body, headers=headers, timeout=WAIT_S)


def test_clients_get_the_servers_vectors(server: Server, front: Gateway) -> None:
    def client_of(url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    texts = [f"text {number}" for number in range(2048)]
    with client_of(server.url) as directly, client_of(front.url) as relayed:
        wanted = directly.embeddings.create(model=MODEL, input=texts)
        for made in (
            relayed.embeddings.create(model=MODEL, input=texts),  # as base64
            relayed.embeddings.create(model=MODEL, input=texts, encoding_format="float"),
        ):
            assert made.usage == wanted.usage
            for one, other in zip(made.data, wanted.data, strict=True):
                assert np.array_equal(np.float32(one.embedding), np.float32(other.embedding))
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            relayed.embeddings.create(model=MODEL, input="x", dimensions=WIDTH + 1)
    rows = np.float32([each.embedding for each in wanted.data[:3]])
    for kind in ("application/octet-stream", "application/vnd.safetensors"):
        body = {"model": MODEL, "input": texts[:3]}
        headers = {"accept": kind, "x-request-id": kind}
        raw = front.client.post("/v1/embeddings", json=body, headers=headers).content
        found = np.frombuffer(raw, "<f4") if kind.endswith("stream") else load(raw)["embeddings"]
        assert np.array_equal(found.reshape(3, WIDTH), rows)
        assert entry_of(front, kind)["input_tokens"] > 0


def test_each_api_is_counted_as_the_server_counts(server: Server, front: Gateway) -> None:
    for path in REQUESTS:
        assert ask(server.url, path).status_code == 200, path
    counted = server.metric("vllm:prompt_tokens_total")
    for path in REQUESTS:
        reply = ask(front.url, path, **{"x-request-id": path})
        entry = entry_of(front, path)
        assert (reply.status_code, entry["outcome"]) == (200, "ok"), path
        assert entry["input_tokens"] == int(reply.headers["x-compute-tokens"]) > 0
        assert entry["output_tokens"] == 0
        counted += entry["input_tokens"]
    eventually(lambda: server.metric("vllm:prompt_tokens_total") == counted)
