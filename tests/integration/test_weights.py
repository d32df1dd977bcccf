"""Updates of weights on a real fleet: once per engine, over deaths, and every token's version is known.

The synthetic engine's tokens tell by which weights they were made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.clients import Streams
from tests.integration.control import (
    BODY,
    ENGINES,
    FLEET,
    FOREVER,
    SERVERS,
    WAIT_S,
    call,
    engine_process,
    of_all,
    served,
    stopped,
)
from tests.integration.golden import write_model
from tests.integration.server import Server, client_of_each, wait_until
from tests.integration.weight_marks import TOLD, WeightFiles, check_marks, marks_of, update

Clients = list[httpx.Client]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*FLEET, directory=tmp_path_factory.mktemp("control")) as running:
        yield running


@pytest.fixture
def clients(fleet: Server) -> Iterator[Clients]:
    """One connection to each API server."""
    with client_of_each(fleet, SERVERS, WAIT_S) as found:
        yield found


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return WeightFiles(tmp_path)


def versions_of(client: httpx.Client) -> list[str | None]:
    return [each["weight_version"] for each in client.get("/weight_version").json()["engines"]]


def test_weights_are_updated_once_per_engine(fleet: Server, clients: Clients, files: WeightFiles) -> None:
    one, other = clients
    path = files.make(1)
    body = update(one, path, "v1", key="first")
    assert (body["status"], body["weight_version"]) == (200, "v1"), body
    assert [result["version"] for result in of_all(body, "result")] == ["v1"] * ENGINES
    assert [versions_of(client) for client in clients] == [["v1"] * ENGINES] * SERVERS
    assert fleet.metric("penstock:engine_weights", version="v1") > 0
    status = httpx.get(f"{fleet.url}/status", timeout=WAIT_S).json()["engines"]
    assert [engine["weight_version"] for engine in status] == ["v1"] * ENGINES
    [digest] = body["digests"]
    for wrong in (["0" * 32], [digest, digest]):
        refused = update(one, files.make(4), "v4", digests=wrong)
        assert refused["status"] == 400
        assert refused["error"]["param"] == ("digests" if len(wrong) > 1 else "digests[0]"), refused
    again = update(other, path, "v1", digests=[digest])
    assert (again["status"], of_all(again, "repeated")) == (200, [True] * ENGINES)
    again = update(other, path, "v1", key="first")
    assert (again["status"], of_all(again, "repeated")) == (200, [True] * ENGINES)
    without_key = update(other, path, "v1")
    assert (without_key["status"], of_all(without_key, "repeated")) == (200, [True] * ENGINES)
    generation = one.get("/weight_version").json()["engines"][0]["generation"]
    taken = update(other, files.make(2), "v1")
    assert (taken["status"], taken["outcome"]) == (409, "conflict")
    assert "weight_version 'v1' is in use for other sources" in taken["error"]["message"]
    used = update(other, files.make(3), "v3", key="first")
    assert (used["status"], used["outcome"]) == (409, "conflict")
    assert one.get("/weight_version").json()["engines"][0]["generation"] == generation
    for client in clients:
        for seed in range(4):
            assert marks_of(served(client, **TOLD, seed=seed)) == {"v1": {1}}
    checksums = one.get("/weights_checksum").json()
    assert checksums["equal"] is True
    assert len(set(of_all(checksums, "result"))) == 1


def test_files_that_do_not_fit_change_no_engine(clients: Clients, files: WeightFiles) -> None:
    assert update(clients[0], files.make(5), "v5")["status"] == 200
    body = update(clients[0], files.make(6, dtype="F32"), "v6")
    assert (body["status"], body["outcome"]) == (502, "aborted")
    assert any("version is F32" in error for error in of_all(body, "error"))
    assert [versions_of(client) for client in clients] == [["v5"] * ENGINES] * SERVERS
    assert marks_of(served(clients[1], **TOLD)) == {"v5": {5}}
    assert update(clients[1], files.make(6), "v6")["status"] == 200


def test_every_token_tells_the_weights_that_made_it(
    fleet: Server, clients: Clients, files: WeightFiles
) -> None:
    """Streams are kept over updates; some have rows of several tokens, and stop strings hold text back."""
    paces: list[dict[str, Any]] = [{}, {"stream_interval": 7}, {"stop": ["no such text"]}, {"logprobs": 1}]
    bodies = [BODY | TOLD | paces[seed % 4] | {"seed": seed} for seed in range(16)]
    assert update(clients[0], files.make(10), "u0")["status"] == 200
    with Streams(fleet.url, bodies) as streams:
        for number in range(1, 5):
            streams.until_each_has(6 * number)
            fields = {"cache": "keep" if number % 2 else "drop"}
            body = update(clients[number % 2], files.make(10 + number), f"u{number}", **fields)
            assert body["status"] == 200, body
        streams.until_all_ended()
        assert streams.failures == []
        check_marks(streams.completions, {f"u{number}": 10 + number for number in range(5)})


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY | {"max_tokens": 5, "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 5, "ignore_eos": True}),
    ],
)
def test_every_api_tells_the_weights_where_it_is_asked_to(
    fleet: Server, clients: Clients, files: WeightFiles, path: str, body: dict[str, Any], stream: bool
) -> None:
    assert update(clients[0], files.make(80), f"{path} {stream}")["status"] == 200
    fields = body | {"stream": stream}
    told = clients[1].post(path, json=fields | {"return_weight_versions": True}).text
    spans = f'"weight_versions":[{{"start":0,"end":5,"version":"{path} {stream}"}}]'
    assert told.count(spans) == body.get("n", 1)
    assert "weight_versions" not in clients[1].post(path, json=fields).text


@pytest.mark.parametrize("cache", ["drop", "keep"])
def test_streams_that_a_pause_keeps_go_on_with_other_weights(
    fleet: Server, clients: Clients, files: WeightFiles, cache: str
) -> None:
    assert update(clients[0], files.make(70), f"{cache}-0")["status"] == 200
    with Streams(fleet.url, [BODY | TOLD | {"seed": seed} for seed in range(8)]) as streams:
        streams.until_each_has(2)
        assert call(clients[0], "/pause?mode=keep")["status"] == 200
        tokens = fleet.metric("vllm:generation_tokens_total")
        body = update(clients[1], files.make(71), f"{cache}-1", cache=cache)
        assert body["status"] == 200, body
        assert fleet.metric("vllm:generation_tokens_total") == tokens
        assert streams.running == 8
        assert call(clients[1], "/resume")["status"] == 200
        streams.until_all_ended()
        assert streams.failures == []
        check_marks(streams.completions, {f"{cache}-0": 70, f"{cache}-1": 71})


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
def test_streams_may_end_with_the_weights_that_they_began_with(
    fleet: Server, clients: Clients, files: WeightFiles, mode: str, reason: str
) -> None:
    assert update(clients[0], files.make(20), f"{mode}-0")["status"] == 200
    with Streams(fleet.url, [BODY | TOLD | {"seed": seed} for seed in range(8)]) as streams:
        streams.until_each_has(2)
        body = update(clients[1], files.make(21), f"{mode}-1", query="?timeout=300", streams=mode)
        assert body["status"] == 200, body
        streams.until_all_ended()
        assert streams.failures == []
        assert {each.last_choice["finish_reason"] for each in streams.completions} == {reason}
        check_marks(streams.completions, {f"{mode}-0": 20})
    assert marks_of(served(clients[0], **TOLD)) == {f"{mode}-1": {21}}


def is_replaced(fleet: Server, pid: int) -> bool:
    """Whether all engines run, and none of them is that process."""
    running = {each.pid for each in fleet.children("engine")}
    return pid not in running and len(running) == ENGINES


def test_an_engine_that_starts_again_serves_with_the_desired_weights_only(
    fleet: Server, clients: Clients, files: WeightFiles
) -> None:
    assert update(clients[0], files.make(30), "w0")["status"] == 200
    found: set[tuple[str, int]] = set()
    over = threading.Event()

    def ask(client: httpx.Client) -> None:
        while not over.is_set():
            told = marks_of(served(client, **TOLD)).items()
            found.update((version, mark) for version, marks in told for mark in marks)

    with ThreadPoolExecutor(SERVERS) as pool:
        asking = [pool.submit(ask, client) for client in clients]
        try:
            for rank in range(ENGINES):
                killed = engine_process(fleet, rank)
                killed.kill()
                with httpx.Client(base_url=fleet.url, timeout=WAIT_S) as client:
                    # it may be back before anybody sees that it is away
                    wait_until(partial(is_replaced, fleet, killed.pid), WAIT_S, "its successor")
                    wait_until(lambda: versions_of(client) == ["w0"] * ENGINES, WAIT_S, "its return")
        finally:
            over.set()
        for each in asking:
            each.result(WAIT_S)
    assert found == {("w0", 30)}


def test_a_stream_that_is_resumed_on_an_engine_with_other_weights_tells_so(
    fleet: Server, clients: Clients, files: WeightFiles
) -> None:
    """Its engine stands still while the other one changes its weights, and is killed."""
    assert update(clients[0], files.make(40), "x0")["status"] == 200
    with Streams(fleet.url, [FOREVER | TOLD | {"seed": seed} for seed in range(8)]) as streams:
        streams.until_each_has(2)
        victim = engine_process(fleet, 0)
        with stopped(victim), ThreadPoolExecutor(1) as pool:
            reply = pool.submit(update, clients[1], files.make(41), "x1", query="?timeout=300")
            wait_until(lambda: "x1" in versions_of(clients[0]), WAIT_S, "the other engine")
            victim.kill()
            body = reply.result(WAIT_S)
        assert body["status"] == 200, body
        most = max(len(each.pieces) for each in streams.completions)
        streams.until_each_has(most + 10)  # those of the engine that was killed, too
        assert call(clients[0], "/abort_requests", {"all": True})["status"] == 200
        streams.until_all_ended()
        assert streams.failures == []
        check_marks(streams.completions, {"x0": 40, "x1": 41})
    assert versions_of(clients[0]) == ["x1"] * ENGINES


def test_the_api_server_that_was_asked_dies_in_the_middle(fleet: Server, files: WeightFiles) -> None:
    """In the end all engines have one version, and requests are served with it."""
    with client_of_each(fleet, SERVERS, WAIT_S) as clients:
        assert update(clients[0], files.make(50), "y0")["status"] == 200
        with stopped(engine_process(fleet, 1)), ThreadPoolExecutor(1) as pool:
            reply = pool.submit(update, clients[0], files.make(51), "y1")
            wait_until(lambda: versions_of(clients[1])[0] == "y1", WAIT_S, "the other engine")
            fleet.kill(*fleet.children("api-server"))
            with pytest.raises(httpx.HTTPError):
                reply.result(WAIT_S)
    wait_until(lambda: len(fleet.children("api-server")) == SERVERS, WAIT_S, "return")
    with client_of_each(fleet, SERVERS, WAIT_S) as clients:
        wait_until(lambda: versions_of(clients[0]) == ["y0"] * ENGINES, WAIT_S, "agreement")
        assert clients[1].get("/weight_version").json()["weight_version"] == "y0"
        assert marks_of(served(clients[1], **TOLD)) == {"y0": {50}}
        assert update(clients[1], files.make(51), "y1")["status"] == 200


def test_an_engine_that_stands_still_keeps_all_at_the_weights_before(
    fleet: Server, clients: Clients, files: WeightFiles
) -> None:
    assert update(clients[0], files.make(60), "z0")["status"] == 200
    with stopped(engine_process(fleet, 0)):
        body = update(clients[0], files.make(61), "z1", query="?timeout=2")
        assert (body["status"], body["outcome"]) == (504, "aborted")
        assert of_all(body, "code") == ["timeout", "aborted"]
    wait_until(lambda: versions_of(clients[1]) == ["z0"] * ENGINES, WAIT_S, "the rollback")
    assert marks_of(served(clients[0], **TOLD)) == {"z0": {60}}


def cannot_be_read(fleet: Server, rank: int, part: str) -> None:
    """The engine says why it has not the settled weights, and gets no streams."""

    def read(path: str) -> Any:
        return httpx.get(f"{fleet.url}{path}", timeout=WAIT_S).json()["engines"][rank]

    wait_until(
        lambda: part in read("/admin/engines")["state_errors"].get("weights", ""), WAIT_S, "the reason"
    )
    wait_until(lambda: part in (read("/weight_version")["error"] or ""), WAIT_S, "the reason again")
    wait_until(lambda: read("/status")["state"] == "behind", WAIT_S, "the state")
    assert [read(path)["weight_version"] for path in ("/status", "/weight_version")] == ["default"] * 2
    wait_until(lambda: f"weights cannot be applied and is tried again: {part}" in fleet.log, WAIT_S, "a line")


@pytest.mark.parametrize("how", ["gone", "replaced"])
def test_an_engine_that_starts_again_takes_no_other_files_and_says_so(
    fleet: Server, clients: Clients, files: WeightFiles, how: str
) -> None:
    path, other = Path(files.make(35)), Path(files.make(36))
    kept = path.with_name("kept")
    assert update(clients[0], str(path), f"{how}-0")["status"] == 200
    path.rename(kept)
    if how == "replaced":
        other.rename(path)
    engine_process(fleet, 1).kill()
    why = f"{path} cannot be read" if how == "gone" else f"{path} has changed since the update"
    cannot_be_read(fleet, 1, why)
    for seed in range(6):
        assert marks_of(served(clients[0], **TOLD, seed=seed)) == {f"{how}-0": {35}}
    kept.rename(path)
    wait_until(lambda: versions_of(clients[0]) == [f"{how}-0"] * ENGINES, WAIT_S, "its return")
    engines = httpx.get(f"{fleet.url}/admin/engines", timeout=WAIT_S).json()["engines"]
    assert [engine["state_errors"] for engine in engines] == [{}] * ENGINES


def test_weights_that_are_wrong_in_themselves_are_refused(clients: Clients, tmp_path: Path) -> None:
    """Before any engine hears of them."""
    os.mkfifo(tmp_path / "pipe")
    save_file({"version": np.array([np.nan], "<f4")}, tmp_path / "nan")
    for name, error in (
        ("pipe", "it is no regular file"),
        ("nan", "version has values that are infinite or not a number"),
        ("none", "does not exist"),
    ):
        body = update(clients[0], str(tmp_path / name), "wrong")
        assert (body["status"], body["error"]["param"]) == (400, "path"), body
        assert error in body["error"]["message"]


# -- the torch engine


def test_a_model_computes_with_other_weights_and_with_its_own_again(
    tiny_llama: Server, tmp_path: Path
) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    own, other = tmp_path / "own", tmp_path / "other"
    for directory in (own, other):
        directory.mkdir()
    write_model(own)
    tensors = load_file(own / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, other / "model.safetensors")

    def reply() -> tuple[str, Any]:
        choice = tiny_llama.post("/v1/completions", body | TOLD, timeout=WAIT_S).json()["choices"][0]
        return choice["text"], choice["weight_versions"]

    def checksum() -> Any:
        return httpx.get(f"{tiny_llama.url}/weights_checksum", timeout=WAIT_S).json()["engines"][0]["result"]

    before, first = reply(), checksum()
    assert before[1] == [{"start": 0, "end": 20, "version": "default"}]
    with httpx.Client(base_url=tiny_llama.url, timeout=WAIT_S) as client:
        made = update(client, str(other), "negated")
        assert made["status"] == 200, made
        text, versions = reply()
        assert (text != before[0], versions) == (True, [{"start": 0, "end": 20, "version": "negated"}])
        negated = checksum()
        assert negated != first
        for path in ("/sleep?level=2", "/wake_up"):
            assert call(client, path)["status"] == 200
        assert (reply(), checksum()) == ((text, versions), negated)
        some = sorted(tensors)[:3]
        part = update(client, str(own / "model.safetensors"), "mixed", tensors=some)
        assert (part["status"], part["engines"][0]["result"]["loaded"]) == (200, 3), part
        mixed = checksum()
        save_file({name: tensors[name] for name in some}, tmp_path / "some.safetensors")
        assert update(client, str(other), "negated again")["status"] == 200
        added = update(client, str(tmp_path / "some.safetensors"), "added", whole=False)
        assert (added["status"], added["engines"][0]["result"]["loaded"]) == (200, 3), added
        assert checksum() == mixed
        wrong = update(client, str(own / "model.safetensors"), "wrong", tensors=["no.such.tensor"])
        assert (wrong["status"], wrong["outcome"]) == (502, "aborted")
        assert "no.such.tensor" in wrong["error"]["message"]
        assert update(client, str(own), "own")["status"] == 200
    assert (reply()[0], checksum()) == (before[0], first)
