"""Attached engines that die, hang, lie or are replaced, under running requests."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from penstock.bench.clock.engine import ClockEngine
from penstock.engine.vocabulary import read_vocab_size
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.integration.attached import AttachedServer
from tests.integration.clients import Streams, texts_of
from tests.integration.control import call
from tests.integration.server import wait_until

LONG: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
BODIES = [LONG | {"prompt": f"{place} is the number"} for place in range(16)]
DEALER, PUSH = zmq.DEALER, zmq.PUSH


def interrupted(attached: AttachedServer, outcome: str) -> float:
    return attached.server.metric("penstock:streams_interrupted_total", outcome=outcome)


def logged(attached: AttachedServer, text: str, times: int = 1) -> None:
    wait_until(lambda: attached.server.log.count(text) >= times, 60, f"logging {text!r} {times} times")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What BODIES are answered."""
    with AttachedServer(directory=tmp_path_factory.mktemp("one"), ranks=1) as attached:
        return texts_of(attached.server.url, BODIES)


def test_a_killed_engines_streams_go_on_and_its_successor_is_taken_in(
    undisturbed: list[str], tmp_path: Path
) -> None:
    with AttachedServer(directory=tmp_path) as attached:
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            attached.kill_engine(0)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert interrupted(attached, "resumed") > 0
        attached.up(1)
        attached.start_engine(0)
        attached.up(2)
        assert texts_of(attached.server.url, BODIES) == undisturbed
        logged(attached, "engine 0 ended with exit code 1: vLLM's engine is lost")
        assert "Traceback" not in attached.server.log


def test_the_only_engines_streams_wait_for_its_successor(undisturbed: list[str], tmp_path: Path) -> None:
    with (
        AttachedServer(directory=tmp_path, ranks=1) as attached,
        Streams(attached.server.url, BODIES) as streams,
    ):
        streams.until_each_has(3)
        attached.kill_engine(0)
        attached.start_engine(0)
        streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)


def test_processes_that_attach_are_killed(undisturbed: list[str], tmp_path: Path) -> None:
    """The engine runs on, and is taken over: it is not started again."""
    with AttachedServer(directory=tmp_path, ranks=1) as attached:
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            (adapter,) = attached.server.children("engine")
            adapter.kill()
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        logged(attached, "engine 0 was attached before, and is taken over")
        assert attached.engines[0].poll() is None
        wait_until(lambda: attached.server.metric("vllm:num_requests_running") == 0, 60, "being idle")


def test_a_pause_keeps_streams_also_over_the_kill_of_a_process_that_attaches(
    undisturbed: list[str], tmp_path: Path
) -> None:
    """Its successor resumes the engine, which is paused again before it gets streams."""
    with (
        AttachedServer(directory=tmp_path) as attached,
        httpx.Client(base_url=attached.server.url, timeout=60) as client,
    ):
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            assert call(client, "/pause?mode=keep")["status"] == 200
            tokens = attached.server.metric("vllm:generation_tokens_total")
            attached.server.children("engine")[0].kill()
            logged(attached, "was attached before, and is taken over")
            attached.up(2)
            assert attached.server.metric("vllm:generation_tokens_total") <= tokens
            assert (streams.running, streams.failures) == (len(BODIES), [])
            assert call(client, "/resume")["status"] == 200
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)


def test_api_servers_are_replaced_and_killed(undisturbed: list[str], tmp_path: Path) -> None:
    with AttachedServer("--api-server-count", "2", directory=tmp_path) as attached:
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            attached.server.process.send_signal(signal.SIGHUP)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            attached.server.children("api-server")[0].kill()
            streams.until_all_ended()
        assert len(streams.failures) < len(BODIES)  # only those of the killed one
        wait_until(
            lambda: attached.server.metric("vllm:num_requests_running") == 0, 90, "dropping the lost streams"
        )
        assert texts_of(attached.server.url, BODIES) == undisturbed


def test_a_restarted_server_takes_its_engines_over(undisturbed: list[str], tmp_path: Path) -> None:
    """Also one that was killed, with requests that the engines still run."""
    with (
        tempfile.TemporaryDirectory() as run_dir,  # a short path, of which sockets need one
        AttachedServer("--run-dir", run_dir, directory=tmp_path, ranks=2) as first,
    ):
        with Streams(first.server.url, BODIES) as streams:
            streams.until_each_has(3)
            first.server.process.kill()
            first.server.process.wait()
        (tmp_path / "second").mkdir()
        second = AttachedServer("--run-dir", run_dir, directory=tmp_path / "second", ranks=2, start=False)
        with second:
            second.server.__enter__()
            second.up(2)
            assert texts_of(second.server.url, BODIES) == undisturbed
            assert second.server.log.count("was attached before, and is taken over") == 2
            assert all(engine.poll() is None for engine in first.engines.values())


def test_clients_are_served_from_the_first_engine_on(tmp_path: Path) -> None:
    with AttachedServer(directory=tmp_path, start=False) as attached:
        attached.start_engine(1)
        attached.ready()
        assert attached.server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
        attached.start_engine(0)
        attached.up(2)


def test_an_engine_that_falls_silent_is_given_up(undisturbed: list[str], tmp_path: Path) -> None:
    with AttachedServer("--engine-hang-timeout", "2", directory=tmp_path) as attached:
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            attached.engines[0].send_signal(signal.SIGSTOP)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        logged(attached, "it has requests, and has sent nothing for 2 s")
        attached.engines[0].send_signal(signal.SIGCONT)
        attached.up(2)


def test_an_engine_that_is_told_to_end_gives_its_streams_away(undisturbed: list[str], tmp_path: Path) -> None:
    """vLLM's engines end requests by aborting them, which nobody has asked for."""
    with AttachedServer(directory=tmp_path) as attached:
        with Streams(attached.server.url, BODIES) as streams:
            streams.until_each_has(3)
            attached.engines[0].terminate()
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)


# -- strangers


class Stranger:
    """Connects to the sockets of an attached server as an engine would, and sends what it likes."""

    def __init__(self, attached: AttachedServer, rank: int = 0) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.handshake = self._socket(DEALER, rank)
        host, port = attached.address
        self.handshake.connect(f"tcp://{host}:{port}")
        self.rank = rank

    def _socket(self, kind: int, rank: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        if kind == DEALER:
            socket.setsockopt(zmq.IDENTITY, rank.to_bytes(2, "little"))
        socket.setsockopt(zmq.LINGER, 500)
        self._sockets.append(socket)
        return socket

    def addresses(self) -> tuple[str, str]:
        self.handshake.send(msgspec.msgpack.encode({"status": "HELLO", "local": False, "headless": True}))
        assert self.handshake.poll(30_000)
        found = msgspec.msgpack.decode(self.handshake.recv())["addresses"]
        return found["inputs"][0], found["outputs"][0]

    def describe(self, address: str, **fields: Any) -> zmq.Socket[bytes]:
        """Connect for requests, with a description of an engine."""
        ready = {"max_model_len": 4096, "vllm_version": "0.32.0", "max_num_seqs": 64, "num_gpu_blocks": 64}
        requests = self._socket(DEALER, self.rank)
        requests.connect(address)
        requests.send(msgspec.msgpack.encode(ready | fields))
        return requests

    def push(self, address: str) -> zmq.Socket[bytes]:
        outputs = self._socket(PUSH, 0)
        outputs.connect(address)
        return outputs

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self.context.term()


class Liar(ClockEngine):
    """An engine of rank 0 in this process, which says anything once it is asked to."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), ranks=2, step_ms=5, vocab_size=read_vocab_size(DEMO_DIR))
        self._words: bytes | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def say(self, words: bytes) -> None:
        self._words = words

    def step(self) -> None:
        words, self._words = self._words, None
        if words is not None:
            self._outputs.send(words)
        super().step()

    def _serve(self) -> None:
        self.connect()
        self.run(until=self._ended.is_set)
        self.close()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(30)


class Refuser(Liar):
    """Answers every request with an error."""

    error: dict[str, Any]

    def _add(self, request: list[Any]) -> None:
        record = [request[0], [], *[None] * 3, 3, *[None] * 7, 0, *[None] * 4, self.error]
        self._outputs.send(msgspec.msgpack.encode([0, [record], None, 0.0]))


def test_errors_of_requests_are_tried_elsewhere_or_told(tmp_path: Path) -> None:
    with AttachedServer(directory=tmp_path, start=False) as attached:
        refuser = Refuser(*attached.address)
        attached.start_engine(1)
        attached.server.__enter__()
        try:
            attached.up(2)
            server, body = attached.server, {"prompt": "x", "max_tokens": 3}
            there = {"X-data-parallel-rank": "0"}
            refuser.error = {"code": "engine_paused", "message": "later", "retryable": True}
            for _ in range(4):
                assert server.complete(**body)["usage"]["completion_tokens"] == 3
            reply = server.post("/v1/completions", body, **there)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            refuser.error = {"code": "validation_error", "message": "bad temperature", "retryable": False}
            reply = server.post("/v1/completions", body, **there)
            assert (reply.status_code, reply.json()["error"]["type"]) == (400, "BadRequestError")
            assert "bad temperature" in reply.json()["error"]["message"]
            refuser.error = {"code": "internal", "message": "broken"}
            assert server.post("/v1/completions", body, **there).status_code == 500
            assert attached.server.log.count("engine is lost") == 0
        finally:
            refuser.end()


GARBAGE = [
    b"",
    b"\xc1" * 100,
    b"\x91" * 5000,
    msgspec.msgpack.encode([0, [["x", [1 << 40]]]]),
    msgspec.msgpack.encode({"a": 1}),
    b"ENGINE_CORE_DEAD",
]


def test_an_engine_that_cannot_be_understood_loses_its_streams_alone(
    undisturbed: list[str], tmp_path: Path
) -> None:
    """Their other engine goes on with them, and it is taken in again. A stranger who sends the same is not
    read."""
    with AttachedServer(directory=tmp_path, start=False) as attached:
        liar = Liar(*attached.address)
        attached.start_engine(1)
        attached.server.__enter__()
        stranger = Stranger(attached)
        try:
            for times, message in enumerate(GARBAGE, 1):
                attached.up(2)
                with Streams(attached.server.url, BODIES) as streams:
                    streams.until_each_has(3)
                    _, outputs = stranger.addresses()
                    pushed = stranger.push(outputs)
                    for _ in range(3):
                        pushed.send(message)
                    liar.say(message)
                    streams.until_all_ended()
                assert (streams.failures, streams.texts) == ([], undisturbed), message[:8]
                logged(attached, "engine is lost", times)
                assert attached.server.log.count("engine is lost") == times, message[:8]
            attached.up(2)
        finally:
            stranger.close()
            liar.end()


def test_connections_that_are_no_engines_disturb_nobody(undisturbed: list[str], tmp_path: Path) -> None:
    """A port scan, HTTP, TLS, another identity, a second engine of a rank, and ranks that there are not."""
    with AttachedServer(directory=tmp_path) as attached:
        beyond, second = Stranger(attached, rank=7), Stranger(attached, rank=0)
        try:
            requests, outputs = second.addresses()
            ports = [attached.address[1], *(int(each.rpartition(":")[2]) for each in (requests, outputs))]
            with Streams(attached.server.url, BODIES) as streams:
                streams.until_each_has(3)
                second.describe(requests)
                beyond.describe(requests)
                beyond.handshake.send(msgspec.msgpack.encode({"status": "HELLO"}))
                for garbage in (b"\xc1", b"\x91" * 1000, b"x" * 70_000):
                    second.handshake.send(garbage)
                second.handshake.send_multipart([b"", b"", b""])
                for port in ports:
                    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(64)):
                        with socket.create_connection(("127.0.0.1", port)) as connection:
                            connection.sendall(sent)
                streams.until_all_ended()
            assert (streams.failures, streams.texts) == ([], undisturbed)
            logged(attached, "engine 7 at 127.0.0.1 wants to be attached, but --data-parallel-size is 2")
            logged(attached, "another engine 0, at 127.0.0.1, wants to be attached: it is left alone")
            assert "started again" not in attached.server.log
        finally:
            beyond.close()
            second.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vllm_version": "0.26.1"}, "engine 0 is vLLM 0.26.1; supported are 0.27 to 0.33"),
        ({"max_model_len": "long"}, "engine 0 describes itself in a way that cannot be understood"),
        ({"max_num_seqs": 0}, "engine 0 describes itself in a way that cannot be understood"),
    ],
)
def test_engines_that_do_not_fit_are_refused_and_others_awaited(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with AttachedServer(directory=tmp_path, ranks=1, start=False) as attached:
        wrong = Stranger(attached)
        requests, _ = wrong.addresses()
        wrong.describe(requests, **fields)
        logged(attached, reason)
        wrong.close()
        attached.start_engine(0)
        attached.ready()
        assert attached.server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


# -- requests


def test_what_vllm_would_not_take_is_refused_by_name(tmp_path: Path) -> None:
    with AttachedServer(directory=tmp_path, ranks=1) as attached:
        for body, field in (
            ({"logit_bias": {"999999": 1}}, "logit_bias"),
            ({"prompt": [999_999]}, "999999"),
            ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ):
            reply = attached.server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **body})
            assert reply.status_code == 400, reply.text
            assert field in reply.json()["error"]["message"]
        assert attached.server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_sleep_and_calls(tmp_path: Path) -> None:
    with AttachedServer(directory=tmp_path) as attached:
        server = attached.server
        assert server.post("/reset_prefix_cache", {}).status_code == 200
        assert server.post("/sleep?level=1", {}).status_code == 200
        assert server.get("/is_sleeping").json()["is_sleeping"] is True
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 503
        assert server.post("/wake_up", {}).status_code == 200
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("attach", ["[::1]:0", "localhost:0"])
def test_over_ipv6_and_by_name(attach: str, tmp_path: Path) -> None:
    if "::1" in attach:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    with AttachedServer(directory=tmp_path, ranks=1, attach=attach) as attached:
        assert attached.server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_more_streams_than_the_engine_runs(tmp_path: Path) -> None:
    options = ("--max-num-seqs", "8")
    with AttachedServer(directory=tmp_path, ranks=1, engine_options=options) as attached:
        bodies = [{"prompt": f"{place}", "max_tokens": 20, "ignore_eos": True} for place in range(100)]
        with Streams(attached.server.url, bodies) as streams:
            streams.until_all_ended()
        assert streams.failures == []
        assert 'engine="0"' in attached.server.metrics()
