"""Flow control and budgets through a real gateway: who waits, who is refused, what clients are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, eventually, gateway
from tests.gateway.redis_server import redis_server

USAGE = '{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":60}}'
ONE_PLACE = ("--flow-control", "--max-requests-per-endpoint", "1")


class Gate:
    """A model server that answers a request when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """The prompts, in order."""
        self._answers = threading.Semaphore(0)

    def __call__(self, call: Call) -> None:
        self.asked.append(call.json["prompt"])
        assert self._answers.acquire(timeout=WAIT_S)
        answer(call)

    def answer(self, count: int = 1) -> None:
        self._answers.release(count)


def answer(call: Call) -> None:
    call.stream('{"choices":[{"text":"a"}]}', USAGE, "[DONE]")


@contextmanager
def clients(front: Gateway) -> Iterator[Any]:
    """Starts requests in threads."""
    with ThreadPoolExecutor(20) as pool, httpx.Client(base_url=front.url, timeout=WAIT_S) as client:

        def start(prompt: str, key: str = "", /, **headers: str) -> Future[httpx.Response]:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            if key:
                sent["authorization"] = f"Bearer {key}"
            body = {"model": "m", "prompt": prompt, "stream": True}
            return pool.submit(client.post, "/v1/completions", json=body, headers=sent)

        yield start


def queued(front: Gateway, key: str = "") -> float:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for line in front.client.get("/metrics", headers=headers).text.splitlines():
        if line.startswith('penstock_gateway_queued_requests{priority="0"}'):
            return float(line.split()[1])
    raise AssertionError("there is no such metric")


def logged(front: Gateway, count: int) -> list[dict[str, Any]]:
    """The access log, once it has this many lines."""
    found: list[dict[str, Any]] = []

    def complete() -> bool:
        lines = [line[line.index("{") :] for line in front.lines if '"request_id"' in line]
        found[:] = [json.loads(line) for line in lines]
        return len(found) >= count

    eventually(complete)
    return found


def test_requests_wait_their_turn_and_leave_with_their_clients() -> None:
    server = Gate()
    with (
        Upstream(server) as upstream,
        gateway(upstream, options=(*ONE_PLACE, "--max-queued-requests", "2")) as front,
        clients(front) as start,
    ):
        first = start("first")
        eventually(lambda: server.asked == ["first"])
        second = start("second")
        eventually(lambda: queued(front) == 1)
        with front.left(prompt="gone"):
            eventually(lambda: queued(front) == 2)
        eventually(lambda: queued(front) == 1)
        third = start("third")
        eventually(lambda: queued(front) == 2)
        refused = start("refused").result()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1000
        server.answer(3)
        assert [each.result().status_code for each in (first, second, third)] == [200, 200, 200]
        assert server.asked == ["first", "second", "third"]
        entries = {entry["outcome"]: entry for entry in logged(front, 5)}
        assert entries["ok"]["queued"] > 0
        assert entries["client_disconnect"]["reason"].startswith("the client left while its request waited")
        assert entries["client_disconnect"]["attempts"] == 0


def test_waits_end_at_the_client_s_deadline_and_with_the_gateway() -> None:
    server = Gate()
    options = (*ONE_PLACE, "--drain-timeout", "0.2")
    with Upstream(server) as upstream, gateway(upstream, options=options) as front, clients(front) as start:
        first = start("first")
        eventually(lambda: server.asked == ["first"])
        late = start("late", x_queue_timeout="0.1").result()
        assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout")
        wrong = start("wrong", x_queue_timeout="soon").result()
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "bad_header")
        assert "'x-queue-timeout' is 'soon'; it takes a number of seconds" in wrong.text
        waiting = start("waiting")
        eventually(lambda: queued(front) == 1)
        front.process.terminate()
        for ended in (first.result(), waiting.result()):
            assert (ended.status_code, ended.json()["error"]["code"]) == (503, "draining")
        server.answer()


KEYS = """
keys:
  - {name: urgent, key: sk-urgent, priority: 5}
  - {name: bulk, key: sk-bulk}
  - {name: other, key: sk-other}
  - name: metered
    key: sk-metered
    models: [m]
    budgets: {requests-per-day: 2, tokens-per-day: 100000}
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as url:
        yield url


def test_priorities_and_keys_decide_whose_turn_it_is(keys_file: Path) -> None:
    server = Gate()
    options = (*ONE_PLACE, "--client-keys-file", str(keys_file))
    with Upstream(server) as upstream, gateway(upstream, options=options) as front, clients(front) as start:
        requests = [start("first", "sk-bulk")]
        eventually(lambda: server.asked == ["first"])
        for prompt, key in (("b1", "bulk"), ("b2", "bulk"), ("b3", "bulk"), ("o1", "other")):
            waiting = queued(front, "sk-bulk")
            requests.append(start(prompt, f"sk-{key}"))
            eventually(lambda waiting=waiting: queued(front, "sk-bulk") == waiting + 1)  # type: ignore[misc]
        requests.append(start("u1", "sk-urgent"))
        eventually(lambda: 'queued_requests{priority="5"} 1' in metrics(front))
        assert 'model_queued_requests{model="*"} 5' in metrics(front)
        server.answer(6)
        assert [each.result().status_code for each in requests] == [200] * 6
        assert server.asked[:2] == ["first", "u1"]
        assert server.asked.index("o1") < server.asked.index("b2")
        assert server.asked.index("b1") < server.asked.index("b2") < server.asked.index("b3")


def metrics(front: Gateway) -> str:
    return front.client.get("/metrics", headers={"authorization": "Bearer sk-bulk"}).text


def test_budgets(keys_file: Path) -> None:
    with (
        Upstream(answer) as upstream,
        gateway(upstream, options=("--client-keys-file", str(keys_file))) as front,
        clients(front) as start,
    ):
        first = start("p", "sk-metered").result()
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "100000"
        assert 90_000 < int(first.headers["x-ratelimit-remaining-tokens"]) < 100_000
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        other_model = front.client.post(
            "/v1/completions",
            json={"model": "dear", "prompt": "p"},
            headers={"authorization": "Bearer sk-metered"},
        )
        assert (other_model.status_code, other_model.json()["error"]["code"]) == (403, "model_not_allowed")
        assert start("p", "sk-metered").result().status_code == 200
        third = start("p", "sk-metered").result()
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert start("p", "sk-other").result().headers.get("x-ratelimit-limit-requests") is None
        assert start("p", "sk-unknown").result().status_code == 401
        text = metrics(front)
        assert 'penstock_gateway_key_request_total{key="metered",outcome="ok"} 2' in text
        assert 'penstock_gateway_key_tokens_total{key="metered",kind="output"} 120' in text
        names = [entry.get("key") for entry in logged(front, 6)]
        assert names == ["metered", "metered", "metered", "metered", "other", None]
        calls = len(upstream.calls)
        for path, fields, code in (
            ("/generate", {}, "route_not_allowed"),
            ("/completion/", {}, "route_not_allowed"),
            ("/v1/chat/completions/batch", {}, "route_not_allowed"),
            ("/nothing", {}, "administrative"),
            ("/v1/completions", {"lora_path": "dear"}, "model_not_allowed"),
            ("/v1/embeddings", {"lora_path": "dear"}, "model_not_allowed"),
        ):
            refused = front.client.post(
                path,
                json={"model": "m", "prompt": "p", **fields},
                headers={"authorization": "Bearer sk-metered"},
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, code), path
        assert len(upstream.calls) == calls
        assert {entry.get("key") for entry in logged(front, 12)[6:]} == {"metered"}
        keys_file.write_text(KEYS.replace("sk-other", "sk-new"))
        eventually(lambda: start("p", "sk-new").result().status_code == 200)
        assert start("p", "sk-other").result().status_code == 401


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_workers_share_budgets(keys_file: Path, store: str, request: pytest.FixtureRequest) -> None:
    options = ["--client-keys-file", str(keys_file), "--workers", "2"]
    if store == "redis":
        options += ["--budget-store", request.getfixturevalue("redis_url")]
        options += ["--budget-store-timeout", str(WAIT_S)]  # on a busy machine no worker counts by itself
    with Upstream(answer) as upstream, gateway(upstream, options=tuple(options)) as front:
        statuses = [ask_anew(front) for _ in range(12)]
        assert sorted(statuses) == [200] * 2 + [429] * 10


def ask_anew(front: Gateway) -> int:
    """A request on a connection of its own, which any worker may take."""
    body = {"model": "m", "prompt": "p", "stream": True}
    return httpx.post(
        f"{front.url}/v1/completions",
        json=body,
        headers={"authorization": "Bearer sk-metered"},
        timeout=WAIT_S,
    ).status_code


def test_budgets_outlive_killed_workers(keys_file: Path) -> None:
    """Each of them once, right after a reply."""
    with (
        Upstream(answer) as upstream,
        gateway(upstream, options=("--client-keys-file", str(keys_file), "--workers", "2")) as front,
    ):
        for number, worker in enumerate(front.workers, 1):
            assert ask_anew(front) == 200
            worker.kill()
            eventually(lambda number=number: restarts(front) == number)  # type: ignore[misc]
        assert ask_anew(front) == 429


def restarts(front: Gateway) -> int:
    return sum("is ready again" in line for line in front.lines)
