"""Vectors from several engines through several API servers, of which an engine dies."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.wire.arrays import F32
from tests.integration.clients import address_of
from tests.integration.server import Server, wait_until

WIDTH = 64
OPTIONS = ("--engine", "synthetic", "--runner", "pooling", "--synthetic-dimensions", str(WIDTH))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two API servers and two engines, of which every step takes a while."""
    options = (*OPTIONS, "--api-server-count", "2", "--data-parallel-size", "2", "--synthetic-step-ms", "4")
    limits = ("--max-num-seqs", "16")  # so that requests wait, and some are under way, when an engine dies
    with Server(*options, *limits, directory=tmp_path_factory.mktemp("vectors")) as server:
        yield server


async def embed(url: str, texts: list[str]) -> tuple[F32, dict[str, Any]]:
    """The vectors of a request of its own connection, and its usage."""
    body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
    reader, writer = await asyncio.open_connection(*address_of(url), limit=1 << 24)
    head = b"POST /v1/embeddings HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    head, _, made = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head, head + made
    reply = json.loads(made)
    assert [entry["index"] for entry in reply["data"]] == list(range(len(texts)))
    rows = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in reply["data"]]
    return np.stack(rows), reply["usage"]


def texts_of(number: int) -> list[str]:
    return [f"text {number} of {part} " * (1 + number % 5) for part in range(1 + number % 4)]


async def all_of(server: Server, count: int, *, kill: bool) -> list[F32]:
    """The vectors of so many concurrent requests."""
    engine = server.children("engine")[0]
    if kill:
        engine.suspend()  # so that it has requests when it dies
    tasks = [asyncio.ensure_future(embed(server.url, texts_of(number))) for number in range(count)]
    if kill:
        waiting = partial(server.metric, "penstock:streams")
        await asyncio.to_thread(wait_until, lambda: waiting() > 20, 60, "requests at the engines")
        engine.kill()
    return [made for made, _ in await asyncio.gather(*tasks)]


def test_no_request_fails_when_an_engine_is_killed(vectors: Server) -> None:
    undisturbed = asyncio.run(all_of(vectors, 300, kill=False))
    disturbed = asyncio.run(all_of(vectors, 1000, kill=True))
    for before, after in zip(undisturbed, disturbed, strict=False):
        assert before.tobytes() == after.tobytes()
    assert vectors.metric("penstock:streams_interrupted_total", outcome="resumed") > 0
    wait_until(lambda: vectors.metric("penstock:engine_up") == 2, 90, "the engine being up again")


def test_a_large_request_has_the_vectors_of_its_inputs_in_their_order(vectors: Server) -> None:
    """It is divided among the engines."""
    texts = [f"input number {number} " * (1 + number % 7) for number in range(600)]

    async def both() -> tuple[tuple[F32, dict[str, Any]], F32]:
        few = [(await embed(vectors.url, [text]))[0] for text in texts[::97]]
        return await embed(vectors.url, texts), np.concatenate(few)

    (whole, usage), few = asyncio.run(both())
    assert whole.shape == (600, WIDTH)
    assert whole[::97].tobytes() == few.tobytes()
    assert usage["prompt_tokens"] == usage["total_tokens"] > 600


def test_metrics_count_requests_for_vectors(vectors: Server) -> None:
    def tokens() -> float:
        return vectors.metric("vllm:prompt_tokens_total")

    before, ended = tokens(), vectors.metric("penstock:api_requests_total", api="embeddings", outcome="stop")
    reply = httpx.post(f"{vectors.url}/v1/embeddings", json={"input": ["one text", "another"]}, timeout=60)
    used = reply.json()["usage"]["prompt_tokens"]
    wait_until(lambda: tokens() - before == used, 30, "counting the prompts' tokens")
    assert vectors.metric("penstock:api_requests_total", api="embeddings", outcome="stop") == ended + 1
    assert vectors.metric("penstock:streams") == 0


def test_a_server_of_vectors_says_what_it_does_not_do(vectors: Server) -> None:
    reply = httpx.post(f"{vectors.url}/v1/completions", json={"prompt": "x"}, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "task_not_supported"
    assert "/v1/embeddings" in reply.json()["error"]["message"]


def test_a_server_of_text_says_what_it_does_not_do(server: Server) -> None:
    reply = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x"}, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "task_not_supported"


def test_a_client_that_leaves_ends_its_streams(vectors: Server) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=vectors.url, timeout=120) as client:
            large = {"input": ["word " * 50] * 2000}
            task = asyncio.ensure_future(client.post("/v1/embeddings", json=large))
            await asyncio.to_thread(
                wait_until, lambda: vectors.metric("penstock:streams") > 0, 60, "the streams' begin"
            )
            task.cancel()

    asyncio.run(leave())
    wait_until(lambda: vectors.metric("penstock:streams") == 0, 60, "the streams' end")
