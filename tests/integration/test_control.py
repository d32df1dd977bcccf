"""Pause and aborts on a real fleet: through any API server, in every mode and dialect, over deaths."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.clients import Streams
from tests.integration.control import (
    BODY,
    ENGINES,
    FLEET,
    FOREVER,
    SERVERS,
    SHORT,
    WAIT_S,
    call,
    engine_process,
    of_all,
    served,
    stopped,
)
from tests.integration.server import SYNTHETIC, Server, client_of_each, wait_until

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


# -- bad input


WEIGHTS: dict[str, Any] = {"path": "/", "weight_version": "v"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mode=later", {}, "mode is 'later', not abort, wait or keep."),
        ("/resume?mode=keep", {}, "/resume takes timeout in its query, not 'mode'."),
        ("/resume", {"mode": "keep"}, "/resume takes timeout in its body, not 'mode'."),
        ("/pause", {"mode": "later"}, "mode is 'later', not abort, wait or keep."),
        ("/pause", {"mode": ["keep"]}, "mode: expected an integer"),
        ("/pause", {"mode": "keep", "clear_cache": 1}, "takes mode, timeout in its body, not 'clear_cache'."),
        ("/pause?mode=abort", {"mode": "keep"}, "mode is 'abort' in the query and 'keep' in the body."),
        ("/pause", {"mode": "keep", "timeout": 0.5}, "timeout is '0.5', not 1 to 3600 seconds."),
        ("/sleep", {"level": 3}, "level is '3', not 1 or 2."),
        ("/flush_cache", {"timeout": True}, "timeout: expected an integer"),
        ("/abort_requests", {}, "Give one of request_ids, prefix, and all (true)."),
        ("/abort_requests", {"all": False}, "Give one of request_ids, prefix, and all (true)."),
        ("/abort_requests", {"all": True, "prefix": "a"}, "Give one of request_ids, prefix, and all (true)."),
        ("/abort_requests", {"request_ids": []}, "request_ids: expected a list of length >= 1, got []."),
        ("/abort_requests", {"request_ids": [""]}, "request_ids[0]: expected a string of length >= 1"),
        ("/abort_requests", {"ids": ["a"]}, "ids"),
        ("/update_weights", {"path": "/"}, "the required field 'weight_version' is missing."),
        ("/update_weights", {"weight_version": "v"}, "Give one of path, paths, broadcast and update_info."),
        (
            "/update_weights",
            WEIGHTS | {"paths": ["/"]},
            "Give one of path, paths, broadcast and update_info.",
        ),
        (
            "/update_weights",
            {"weight_version": "v", "update_info": {}},
            "update_info is for vLLM's engines, not synthetic: give them files or a broadcast.",
        ),
        ("/init_weight_transfer_engine", {}, "the required field 'init_info' is missing."),
        (
            "/init_weight_transfer_engine",
            {"init_info": {}},
            "init_info is for vLLM's engines, not synthetic: give them files or a broadcast.",
        ),
        ("/update_weights", WEIGHTS | {"path": "step-7"}, "path: 'step-7' is no absolute path."),
        ("/update_weights", WEIGHTS | {"path": "/no/such/file"}, "path: '/no/such/file' does not exist."),
        ("/update_weights", WEIGHTS | {"tensors": ["a"], "whole": True}, "whole: a model that is replaced"),
        (
            "/update_weights",
            WEIGHTS | {"tensors": ["a", "b", "a"], "whole": False},
            "tensors[2]: 'a' is there twice.",
        ),
        (
            "/update_weights",
            {"weight_version": "v", "paths": ["/a", "/b/../a"]},
            "paths[1]: '/a' is there twice.",
        ),
        ("/update_weights", WEIGHTS | {"streams": "drop"}, "streams: "),
        ("/update_weights", WEIGHTS | {"cache": "flush"}, "cache: "),
        ("/update_weights", WEIGHTS | {"weight_version": "default"}, "'default' is that of the start."),
        ("/update_weights", WEIGHTS | {"weight_version": "é"}, "weight_version: "),
        ("/update_weights", WEIGHTS | {"tensor": ["a"]}, "tensor"),
    ],
)
def test_bad_requests(fleet: Server, path: str, body: dict[str, Any], message: str) -> None:
    reply = fleet.post(path, body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"], reply.text


def test_other_servers_routes_name_the_one_here(fleet: Server) -> None:
    reply = fleet.post("/pause_generation", {"mode": "in_place"})
    assert reply.status_code == 404
    assert 'Here it is POST /pause {"mode": …}: abort, wait, or keep' in reply.json()["error"]["message"]


def test_only_administrators(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, "--api-key", "user", "--admin-api-key", "admin", directory=tmp_path) as server:
        client = {"authorization": "Bearer user"}
        for path in ("/pause", "/resume", "/abort_requests", "/flush_cache", "/update_weights"):
            reply = httpx.post(f"{server.url}{path}", headers=client, timeout=WAIT_S)
            assert reply.json()["error"]["code"] == "not_admin"
        for path in ("/is_paused", "/weight_version", "/weights_checksum"):
            reply = httpx.get(f"{server.url}{path}", headers=client, timeout=WAIT_S)
            assert reply.json()["error"]["code"] == "not_admin"


def test_an_update_info_that_no_engine_can_be_sent(clients: Clients) -> None:
    body = {"weight_version": "v", "update_info": {"names": ["a" * 800_000]}}
    reply = clients[0].post("/update_weights", json=body)
    assert reply.status_code == 413
    assert "update_info: the body has 800051 bytes, at most 786432 are taken." in reply.text


def test_versions_before_any_update(fleet: Server, clients: Clients) -> None:
    for client in clients:
        assert client.get("/weight_version").json() == {
            "weight_version": "default",
            "settled": True,
            "engines": [
                {"rank": rank, "weight_version": "default", "generation": 0, "error": None}
                for rank in range(ENGINES)
            ],
        }
    assert fleet.metric("penstock:engine_weights", version="default") == 0


@pytest.fixture
def unpaused(clients: Clients) -> Iterator[None]:
    yield
    assert call(clients[0], "/resume")["status"] == 200


# -- pause


def refused(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json=SHORT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "paused")
    assert reply.headers["retry-after"] == "1"
    reply = client.get("/ready")
    assert (reply.status_code, reply.json()["phase"]) == (503, "paused")
    assert client.get("/health").status_code == 200


@pytest.mark.usefixtures("unpaused")
def test_pause_ends_streams_with_what_they_have(fleet: Server, clients: Clients) -> None:
    with Streams(fleet.url, [FOREVER | {"seed": seed} for seed in range(12)]) as streams:
        streams.until_each_has(2)
        body = call(clients[0], "/pause")
        assert (body["status"], body["operation"]) == (200, "pause")
        assert [result["paused"] for result in of_all(body, "result")] == [True] * ENGINES
        for client in clients:
            refused(client)
            assert client.get("/is_paused").json() == {"is_paused": True}
        streams.until_all_ended()
        assert streams.failures == []
        for completion in streams.completions:
            assert completion.done
            assert completion.last_choice["finish_reason"] == "abort"
            assert completion.text
    states = httpx.get(f"{fleet.url}/status", timeout=WAIT_S).json()["engines"]
    assert [state["state"] for state in states] == ["paused"] * ENGINES
    assert call(clients[1], "/resume")["status"] == 200
    for client in clients:
        assert served(client)["finish_reason"] == "length"
        assert client.get("/is_paused").json() == {"is_paused": False}


MESSAGES = [{"role": "user", "content": "x"}]
APIS = {
    "/v1/completions": BODY | {"max_tokens": 2000},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2000, "ignore_eos": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 2000, "ignore_eos": True},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 2000},
}


def end_of(path: str, reply: dict[str, Any]) -> tuple[object, bool]:
    """How the API says that it was aborted, and whether there is output."""
    if path == "/v1/responses":
        text = "".join(part["text"] for item in reply["output"] for part in item["content"])
        assert reply["status"] == "incomplete"
        return reply["incomplete_details"]["reason"], bool(text)
    if path == "/v1/messages":
        return reply["stop_reason"], bool("".join(block["text"] for block in reply["content"]))
    [choice] = reply["choices"]
    return choice["finish_reason"], bool(choice["text"] if "text" in choice else choice["message"]["content"])


def wait_for_tokens(fleet: Server, before: float, count: int) -> None:
    wait_until(
        lambda: fleet.metric("vllm:generation_tokens_total") >= before + count, WAIT_S, "the first tokens"
    )


@pytest.mark.usefixtures("unpaused")
@pytest.mark.parametrize("path", APIS)
def test_a_whole_reply_has_what_there_was_at_the_pause(fleet: Server, clients: Clients, path: str) -> None:
    before = fleet.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(fleet.post, path, APIS[path], timeout=WAIT_S)
        wait_for_tokens(fleet, before, 20)
        assert call(clients[0], "/pause")["status"] == 200
        found = reply.result(WAIT_S)
    assert found.status_code == 200, found.text
    word = "pause_turn" if path == "/v1/messages" else "abort"
    assert end_of(path, found.json()) == (word, True)


@pytest.mark.usefixtures("unpaused")
@pytest.mark.parametrize("path", APIS)
def test_an_event_stream_ends_at_the_pause(fleet: Server, clients: Clients, path: str) -> None:
    seen = 0
    with httpx.stream(
        "POST", f"{fleet.url}{path}", json=APIS[path] | {"stream": True}, timeout=WAIT_S
    ) as reply:
        lines = []
        for line in reply.iter_lines():
            lines.append(line)
            seen += line.startswith("data: ")
            if seen == 8:
                assert call(clients[1], "/pause")["status"] == 200
    text = "\n".join(lines)
    assert '"error":{' not in text
    reason, end = {
        "/v1/responses": ('"incomplete_details":{"reason":"abort"}', "event: response.incomplete"),
        "/v1/messages": ('"stop_reason":"pause_turn"', "event: message_stop"),
    }.get(path, ('"finish_reason":"abort"', "[DONE]"))
    assert reason in text
    assert end in text


@pytest.mark.usefixtures("unpaused")
def test_sleep_does_not_wait_for_streams_that_a_pause_keeps(fleet: Server, clients: Clients) -> None:
    with Streams(fleet.url, [BODY | {"seed": seed} for seed in range(4)]) as streams:
        streams.until_each_has(1)
        assert call(clients[0], "/pause?mode=keep")["status"] == 200
        refused = call(clients[1], f"/sleep?mode=wait&timeout={10 * WAIT_S}")
        assert (refused["status"], refused["outcome"]) == (502, "aborted"), refused
        assert "a pause keeps the streams: resume first, or sleep with mode 'abort'" in str(refused["error"])
        assert call(clients[0], "/resume")["status"] == 200
        streams.until_all_ended()
        assert streams.failures == []
        assert {each.last_choice["finish_reason"] for each in streams.completions} == {"length"}


@pytest.mark.usefixtures("unpaused")
def test_pause_may_wait_for_streams(fleet: Server, clients: Clients) -> None:
    with (
        Streams(fleet.url, [BODY | {"seed": seed} for seed in range(12)]) as streams,
        ThreadPoolExecutor(1) as pool,
    ):
        streams.until_each_has(1)
        reply = pool.submit(call, clients[0], "/pause?mode=wait&timeout=300")
        wait_until(lambda: clients[1].get("/is_paused").json()["is_paused"], WAIT_S, "its beginning")
        streams.until_all_ended()
        assert streams.failures == []
        assert {each.last_choice["finish_reason"] for each in streams.completions} == {"length"}
        assert reply.result(WAIT_S)["status"] == 200
    for client in clients:
        refused(client)


def test_pause_may_keep_streams_and_queue_new_ones(fleet: Server, clients: Clients) -> None:
    bodies = [BODY | {"seed": seed, "return_token_ids": True} for seed in range(12)]
    with Streams(fleet.url, bodies) as undisturbed:
        undisturbed.until_all_ended()
    with Streams(fleet.url, bodies) as streams:
        streams.until_each_has(1)
        assert call(clients[0], "/pause?mode=keep")["status"] == 200
        assert all(client.get("/is_paused").json()["is_paused"] for client in clients)
        tokens = fleet.metric("vllm:generation_tokens_total")
        with Streams(fleet.url, [SHORT | {"seed": seed} for seed in range(4)]) as queued:
            wait_until(lambda: fleet.metric("vllm:num_requests_waiting") == 4, WAIT_S, "the queue")
            assert streams.running == 12
            assert fleet.metric("vllm:generation_tokens_total") == tokens
            assert call(clients[1], "/resume")["status"] == 200
            queued.until_all_ended()
            assert queued.failures == []
        streams.until_all_ended()
        assert streams.failures == []
        expected = [each.token_ids for each in undisturbed.completions]
        assert [each.token_ids for each in streams.completions] == expected


def test_parameters_in_the_body_are_those_of_the_query(fleet: Server, clients: Clients) -> None:
    """A pause of nothing ends streams: what is wrong with it must be said before."""
    with Streams(fleet.url, [FOREVER | {"seed": seed} for seed in range(2)]) as streams:
        streams.until_each_has(1)
        for body in ({"modus": "keep"}, {"mode": "in_place"}, ["keep"]):
            assert call(clients[0], "/pause", body)["status"] == 400
        assert call(clients[0], "/pause", {"mode": "keep", "timeout": 60}, "body")["status"] == 200
        assert streams.running == 2
        again = call(clients[1], "/pause?mode=keep", {"mode": None}, "body")
        assert (again["status"], of_all(again, "repeated")) == (200, [True] * ENGINES)
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert clients[0].post("/resume", content=b"mode=keep", headers=form).status_code == 400
        assert clients[0].post("/resume", content=b"", headers=form).status_code == 200
        streams.until_each_has(20)
        assert call(clients[0], "/pause", {"mode": "abort"})["status"] == 200
        streams.until_all_ended()
        assert [each.last_choice["finish_reason"] for each in streams.completions] == ["abort"] * 2
    assert call(clients[0], "/resume")["status"] == 200


def test_the_same_pause_twice_through_both_api_servers(clients: Clients) -> None:
    one, other = clients
    for path, key in (("/pause", "pause-1"), ("/resume", "resume-1")):
        first, again = call(one, path, key=key), call(other, path, key=key)
        assert (first["status"], again["status"]) == (200, 200)
        assert of_all(first, "repeated") == [False] * ENGINES
        assert of_all(again, "repeated") == [True] * ENGINES
    assert call(one, "/pause?mode=keep", key="pause-1")["status"] == 409
    served(one)


@pytest.mark.usefixtures("unpaused")
def test_an_engine_that_starts_again_is_paused_as_the_others(fleet: Server, clients: Clients) -> None:
    assert call(clients[0], "/pause")["status"] == 200
    fleet.kill(engine_process(fleet, 1))
    for client in clients:
        refused(client)
    wait_until(lambda: len(fleet.children("engine")) == ENGINES, WAIT_S, "its successor")
    wait_until(lambda: paused(fleet) == [True, True], WAIT_S, "its pause")
    for client in clients:
        refused(client)


@pytest.mark.usefixtures("unpaused")
def test_streams_that_lose_their_engine_while_pause_waits_end_with_what_they_have(
    fleet: Server, clients: Clients
) -> None:
    """They would wait for an engine until --resume-timeout, which is longer than anybody waits here."""
    victim = engine_process(fleet, 1)
    with (
        Streams(fleet.url, [FOREVER | {"seed": seed} for seed in range(6)], rank=1) as lost,
        Streams(fleet.url, [BODY | {"seed": seed} for seed in range(6)], rank=0) as others,
    ):
        lost.until_each_has(2)
        others.until_each_has(1)  # those that come later would be refused
        with stopped(victim), ThreadPoolExecutor(1) as pool:
            reply = pool.submit(call, clients[0], "/pause?mode=wait&timeout=300")
            wait_until(
                lambda: all(client.get("/is_paused").json()["is_paused"] for client in clients),
                WAIT_S,
                "its beginning",
            )
            victim.kill()
            for streams, reason in ((lost, "abort"), (others, "length")):
                streams.until_all_ended()
                assert streams.failures == []
                assert {each.last_choice["finish_reason"] for each in streams.completions} == {reason}
                assert all(each.text for each in streams.completions)
            assert reply.result(WAIT_S)["status"] == 200
    for client in clients:
        refused(client)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_the_api_server_that_was_asked_to_pause_dies_in_the_middle(fleet: Server, mode: str) -> None:
    """The engine that is paused by then goes on."""
    with (
        client_of_each(fleet, SERVERS, WAIT_S) as clients,
        stopped(engine_process(fleet, 1)),
        ThreadPoolExecutor(1) as pool,
    ):
        reply = pool.submit(call, clients[0], f"/pause?mode={mode}")
        wait_until(lambda: paused(fleet)[0], WAIT_S, "the other engine's pause")
        fleet.kill(*fleet.children("api-server"))
        with pytest.raises(httpx.HTTPError):
            reply.result(WAIT_S)
    wait_until(lambda: len(fleet.children("api-server")) == SERVERS, WAIT_S, "return")
    with client_of_each(fleet, SERVERS, WAIT_S) as clients:
        wait_until(lambda: paused(fleet) == [False] * ENGINES, WAIT_S, "agreement")
        for client in clients:
            wait_until(lambda: client.get("/ready").status_code == 200, WAIT_S, "service")  # noqa: B023
            served(client)
            assert client.get("/is_paused").json() == {"is_paused": False}


def paused(fleet: Server) -> list[bool]:
    found = httpx.get(f"{fleet.url}/admin/engines", timeout=WAIT_S).json()["engines"]
    return [each["paused"] for each in found]


# -- aborts


def test_requests_are_aborted_by_their_ids_whichever_api_server_has_them(
    fleet: Server, clients: Clients
) -> None:
    names = [f"abort-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        before = fleet.metric("vllm:generation_tokens_total")
        replies = [
            pool.submit(
                clients[number % 2].post,
                "/v1/completions",
                json=FOREVER | {"seed": number},
                headers={"x-request-id": name},
            )
            for number, name in enumerate(names)
        ]
        wait_for_tokens(fleet, before, 200)
        wait_until(lambda: fleet.metric("vllm:num_requests_running") == 8, WAIT_S, "all of them")
        with httpx.Client(base_url=fleet.url, timeout=WAIT_S) as client:
            ids = {"request_ids": [names[0], f"cmpl-{names[1]}", "unknown"]}
            body = call(client, "/abort_requests", ids)
            assert (body["status"], body["aborted"]) == (200, 2)
            assert sum(of_all(body, "result")) == 2
            for reply in replies[:2]:
                [choice] = reply.result(WAIT_S).json()["choices"]
                assert choice["finish_reason"] == "abort"
                assert choice["text"]
            assert call(client, "/abort_requests", {"prefix": "cmpl-abort-2"})["aborted"] == 1
            assert replies[2].result(WAIT_S).json()["choices"][0]["finish_reason"] == "abort"
            first = call(client, "/abort_requests", {"all": True}, key="all")
            again = call(client, "/abort_requests", {"all": True}, key="all")
            assert (first["aborted"], again["aborted"]) == (5, 5)
            assert of_all(again, "repeated") == [True] * ENGINES
        assert {reply.result(WAIT_S).status_code for reply in replies} == {200}


def test_an_engine_that_dies_while_requests_are_aborted(fleet: Server, clients: Clients) -> None:
    """Its streams go on at the other engine, which has answered by then; the process after it has none."""
    victim = engine_process(fleet, 1)
    with Streams(fleet.url, [BODY | {"seed": seed} for seed in range(8)]) as streams:
        streams.until_each_has(1)
        with stopped(victim), ThreadPoolExecutor(1) as pool:
            reply = pool.submit(call, clients[0], "/abort_requests", {"all": True})
            wait_until(
                lambda: fleet.metric("vllm:num_requests_running", engine="0") == 0, WAIT_S, "the aborts"
            )
            victim.kill()
            body = reply.result(WAIT_S)
        assert body["status"] == 200, body
        assert of_all(body, "restarted") == [False, True]
        assert of_all(body, "result")[1] == 0
        streams.until_all_ended()
        assert streams.failures == []
        reasons = [each.last_choice["finish_reason"] for each in streams.completions]
        assert reasons.count("abort") == body["aborted"]
