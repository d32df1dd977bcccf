"""What a gateway sends to a second server, and what it does not."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.gateway.behaviours import cut_head, good, stalled
from tests.gateway.processes import Behaviour, Call, Gateway, Upstream, eventually, gateway


def models(call: Call) -> None:
    call.reply(200, b'{"data":[]}')


def full(retry_after: str = "", status: int = 429) -> Behaviour:
    """Refuses, and says when to come back."""
    said = f"retry-after: {retry_after}\r\n" if retry_after else ""

    def behaviour(call: Call) -> None:
        call.send(f"HTTP/1.1 {status} X\r\n{said}content-length: 2\r\n\r\n{{}}".encode())

    return behaviour


def until_called(server: Upstream, front: Gateway, *, method: str = "POST") -> list[httpx.Response]:
    """Asks until the server was picked; equal endpoints are picked at random."""
    replies = []
    while not server.calls:
        replies.append(front.complete() if method == "POST" else front.client.get("/v1/models"))
    return replies


BREAKS: list[Behaviour] = [cut_head, lambda call: call.reset(), lambda call: call.reply(502, b"{}")]
breaks = pytest.mark.parametrize("bad", BREAKS, ids=["in its head", "before it", "502"])


@breaks
def test_a_request_that_only_reads_is_sent_to_another_server(bad: Behaviour) -> None:
    with Upstream(bad) as first, Upstream(models) as second, gateway(first, second) as front:
        replies = until_called(first, front, method="GET")
        assert {reply.status_code for reply in replies} == {200}
        assert front.counts("retry_total")[""] > 0


@breaks
def test_a_completion_that_a_server_may_have_begun_is_not(bad: Behaviour) -> None:
    """It would cost twice; and if it has broken the server, it would break the next."""
    with Upstream(bad) as first, Upstream(good) as second, gateway(first, second) as front:
        *before, failed = until_called(first, front)
        assert {reply.status_code for reply in before} <= {200}
        assert failed.status_code == 502
        assert len(first.calls) + len(second.calls) == len(before) + 1


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/files"), ("POST", "/v1/batches"), ("DELETE", "/v1/files/f")]
)
def test_nor_is_what_changes_something(method: str, path: str) -> None:
    with Upstream(cut_head) as first, Upstream(cut_head) as second, gateway(first, second) as front:
        assert front.client.request(method, path).status_code == 502
        assert len(first.calls) + len(second.calls) == 1


def test_a_prompt_that_breaks_its_server_meets_one() -> None:
    """Six of them, as many calls."""

    def breaks(call: Call) -> None:
        call.reset()

    with Upstream(breaks) as one, Upstream(breaks) as other, gateway(one, other) as front:
        for _ in range(6):
            assert front.complete().status_code == 502
        assert len(one.calls) + len(other.calls) == 6


def test_a_server_that_stalls_is_not_replaced_for_a_completion() -> None:
    options = ("--first-token-timeout", "0.3")
    with Upstream(stalled) as one, Upstream(stalled) as other, gateway(one, other, options=options) as front:
        assert front.complete().status_code == 504
        assert len(one.calls) + len(other.calls) == 1
        assert front.client.get("/v1/models").status_code == 504
        assert len(one.calls) + len(other.calls) == 3


def test_the_request_timeout_is_one_of_the_request() -> None:
    servers = [Upstream(stalled) for _ in range(3)]
    with servers[0], servers[1], servers[2]:
        options = ("--request-timeout", "0.6", "--first-token-timeout", "0.4")
        with gateway(*servers, options=options) as front:
            reply = front.client.get("/v1/models")
            assert reply.status_code == 504
            assert sum(len(server.calls) for server in servers) < 3, "there is no time for a third one"


def lost(call: Call) -> None:
    """As a Penstock server whose engines the request has broken."""
    call.send(b"HTTP/1.1 503 X\r\nretry-after: 1\r\nx-request-begun: true\r\ncontent-length: 2\r\n\r\n{}")


def test_a_request_that_broke_the_engines_of_a_server_is_its_clients() -> None:
    with Upstream(lost) as one, Upstream(lost) as other, gateway(one, other) as front:
        assert front.complete().status_code == 503
        assert len(one.calls) + len(other.calls) == 1
        assert front.complete().status_code == 503, "it does not back off"


# -- servers that refuse


@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_server_that_refuses_is_replaced(status: int) -> None:
    with Upstream(full(status=status)) as first, Upstream(good) as second, gateway(first, second) as front:
        assert {reply.status_code for reply in until_called(first, front)} == {200}


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(status: int) -> None:
    refusing = full("30", status)
    with Upstream(refusing) as first, Upstream(good) as second, gateway(first, second) as front:
        until_called(first, front)
        assert {front.complete().status_code for _ in range(20)} == {200}
        assert len(first.calls) == 1
        assert front.counts("endpoint_up") == {first.url: 1, second.url: 1}, "it is healthy"


def test_a_server_that_wants_no_pause_is_one_that_fails() -> None:
    """Or its clock is behind."""
    with Upstream(full("0", 503)) as first, Upstream(good) as second, gateway(first, second) as front:
        eventually(
            lambda: front.complete().status_code == 200 and front.counts("endpoint_up")[first.url] == 0
        )


def test_clients_learn_the_least_wait() -> None:
    with Upstream(full("30")) as one, Upstream(full("20")) as other, gateway(one, other) as front:
        relayed = front.complete()
        assert (relayed.status_code, relayed.text) == (429, "{}")
        assert 18 <= int(relayed.headers["retry-after"]) <= 20, "also if the other one was asked last"
        refused = front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "backing_off")
        assert 15_000 < int(refused.headers["retry-after-ms"]) <= 20_000
        assert len(one.calls) == len(other.calls) == 1
        assert front.counts("rejection_total") == {"backing_off": 1}


def test_one_clients_limit_is_not_that_of_others() -> None:
    def per_key(call: Call) -> None:
        if call.headers["authorization"] == "Bearer poor":
            full("30")(call)
        else:
            good(call)

    with Upstream(per_key) as server, gateway(server, options=("--api-key", "poor", "rich")) as front:
        front.client.headers["authorization"] = "Bearer poor"
        assert [front.complete().status_code for _ in range(3)] == [429] * 3
        assert len(server.calls) == 1
        front.client.headers["authorization"] = "Bearer rich"
        assert front.complete().status_code == 200


OWN_KEY = ("--endpoint-api-key", "endpoints-secret")


def denies(status: int = 401) -> Behaviour:
    """Refuses the key that it gets."""
    return lambda call: call.reply(status, b'{"error":{"message":"Bad key.","code":"invalid_api_key"}}')


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_the_gateways_own_key_is_replaced(status: int) -> None:
    with (
        Upstream(denies(status)) as bad,
        Upstream(good) as well,
        gateway(bad, well, options=OWN_KEY) as front,
    ):
        assert {reply.status_code for reply in until_called(bad, front)} == {200}
        well.behaviour = models
        assert front.client.post("/v1/files", content=b"x").status_code == 200
        told = [line for line in front.lines if "ERROR" in line]
        assert len(told) == 1
        assert f"{bad.url} refuses the key of --endpoint-api-key (status {status})" in told[0]


def test_without_another_server_that_is_no_fault_of_the_client() -> None:
    with Upstream(denies()) as bad, gateway(bad, options=OWN_KEY) as front:
        for _ in range(3):
            reply = front.complete()
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (502, "upstream_failed")
            assert "--endpoint-api-key" in error["message"]
        assert front.counts() == {"model_server_error": 3}
        assert OWN_KEY[1] not in f"{reply.text}{front.lines}"


def test_then_another_pool_stands_in(tmp_path: Path) -> None:
    with Upstream(denies()) as bad, Upstream(good) as spare:
        path = tmp_path / "pools.yaml"
        path.write_text(
            f"pools:\n- name: main\n  endpoints: [{bad.url}]\n  models: [m]\n  fallback: [spare]\n"
            f"- name: spare\n  endpoints: [{spare.url}]\n  models: [m]\n"
        )
        options = (*OWN_KEY, "--models-interval", "0", "--endpoints-file", str(path))
        with gateway(options=options) as front:
            assert front.complete().status_code == 200
            assert (len(bad.calls), len(spare.calls)) == (1, 1)


def test_a_clients_own_key_is_its_own_affair() -> None:
    with Upstream(denies()) as bad, Upstream(good) as well, gateway(bad, well) as front:
        *_, refused = until_called(bad, front)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert front.counts()["client_error"] == 1
