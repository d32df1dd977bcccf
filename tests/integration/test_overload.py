"""What does not fit the queue is refused at once, whole, with the time to try again."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.server import Server, data_of, wait_until
from tests.integration.test_connections import connect, request

LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SLOTS = 2
PLACES = 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two slots, and places for two more streams."""
    slow = ("--engine", "synthetic", "--synthetic-step-ms", "100", "--served-model-name", "m")
    limits = ("--max-num-seqs", str(SLOTS), "--max-num-queued-reqs", str(PLACES))
    with Server(*slow, *limits, directory=tmp_path_factory.mktemp("small")) as running:
        yield running


def load(server: Server) -> dict[str, float]:
    return {name: server.metric(f"vllm:num_requests_{name}") for name in ("running", "waiting")}


@contextmanager
def occupied(server: Server, streams: int) -> Iterator[None]:
    """The server with so many streams that do not end by themselves."""
    expected = {"running": min(streams, SLOTS), "waiting": max(streams - SLOTS, 0)}
    with ExitStack() as stack:
        for _ in range(streams):
            stack.enter_context(connect(server)).sendall(request(LONG))
        wait_until(lambda: load(server) == expected, 60, f"{expected}")
        yield
    wait_until(lambda: load(server) == {"running": 0, "waiting": 0}, 60, "the end of all streams")


def check_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 429, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("RateLimitError", "overloaded")
    assert "--max-num-queued-reqs" in error["message"]
    milliseconds = int(reply.headers["retry-after-ms"])
    assert 1000 <= milliseconds <= 60_000
    assert int(reply.headers["retry-after"]) == -(-milliseconds // 1000)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_429_until_there_is_room(small: Server, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
    with occupied(small, SLOTS + PLACES):
        check_refused(small.post("/v1/completions", body))
    assert small.post("/v1/completions", body).status_code == 200
    assert small.metric("penstock:requests_refused_total", reason="overloaded") > 0
    assert small.metric("penstock:requests_total", outcome="error") == 0, "refused requests have not run"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("many", [{"n": 4}, {"prompt": ["a", "b", "c", "d"]}])
def test_a_request_is_taken_whole_or_not_at_all(small: Server, many: dict[str, Any], stream: bool) -> None:
    body = LONG | many | {"stream": stream, "temperature": 1}
    with occupied(small, SLOTS):
        check_refused(small.post("/v1/completions", body))
        wait_until(lambda: load(small) == {"running": SLOTS, "waiting": 0}, 60, "the end of those taken")
    whole = small.post("/v1/completions", body | {"max_tokens": 2})
    assert whole.status_code == 200
    if stream:
        assert data_of(whole.text)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("many", "param"), [({"n": 5}, "n"), ({"best_of": 5}, "best_of"), ({"prompt": ["x"] * 5}, "prompt")]
)
def test_what_can_never_fit_is_no_overload(small: Server, many: dict[str, Any], param: str) -> None:
    refused = small.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 1} | many)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert "at most 4" in error["message"]
    assert "--max-num-queued-reqs" in error["message"]


def test_the_openai_client_tries_again_and_is_served(tmp_path: Path) -> None:
    options = ("--engine", "synthetic", "--synthetic-step-ms", "20", "--served-model-name", "m")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "0")
    with (
        Server(*options, *limits, directory=tmp_path) as server,
        ThreadPoolExecutor() as pool,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=50) as client,
        connect(server) as other,
    ):
        other.sendall(request(LONG))
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1, 60, "its start")
        asked = pool.submit(client.completions.create, model="m", prompt="x", max_tokens=3)
        wait_until(lambda: server.metric("penstock:requests_refused_total") > 0, 60, "the first refusal")
        other.close()
        usage = asked.result(timeout=110).usage
        assert usage is not None
        assert usage.completion_tokens == 3


def test_the_limit_is_exact_across_api_servers_and_engines(tmp_path: Path) -> None:
    options = ("--engine", "synthetic", "--synthetic-step-ms", "100", "--served-model-name", "m")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "3")
    processes = ("--api-server-count", "2", "--data-parallel-size", "2")
    with Server(*options, *limits, *processes, directory=tmp_path) as server, ExitStack() as stack:
        replies = []
        for _ in range(40):
            connection = stack.enter_context(connect(server))
            connection.sendall(request(LONG))
            connection.setblocking(False)
            replies.append(Reply(connection))

        def answered() -> Counter[str]:
            return Counter(reply.status() for reply in replies)

        # Two run; of the queue, one engine has two places and the other has one.
        expected = Counter({"429": 35, "200": 2, "": 3})
        wait_until(lambda: answered() == expected, 60, "an answer to each request that does not wait")


class Reply:
    """What has arrived of a reply."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""

    def status(self) -> str:
        with suppress(BlockingIOError):
            self._data += self._connection.recv(65536)
        return self._data[9:12].decode()


def test_too_many_connections_are_told_to_come_back(tmp_path: Path) -> None:
    options = ("--engine", "synthetic", "--max-connections", "1")
    with (
        Server(*options, directory=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=60) as first,
    ):
        assert first.get("/health").status_code == 200
        refused = server.get("/v1/models")
        assert refused.status_code == 503
        assert refused.headers["retry-after-ms"] == "1000"
        assert refused.json()["error"]["code"] == "too_many_connections"
        counted = re.compile(r"requests_refused_total{.*too_many_connections.*} [1-9]")
        wait_until(lambda: counted.search(first.get("/metrics").text), 90, "counting the refusal")
