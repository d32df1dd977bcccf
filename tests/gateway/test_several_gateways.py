"""Gateways that share nothing, in front of the same servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.gateway.behaviours import good
from tests.gateway.processes import Gateway, Upstream, eventually, gateway
from tests.gateway.redis_stand_in import RedisStandIn
from tests.gateway.test_flow_control import ONE_PLACE, Gate, answer, clients, queued


def ask(front: Gateway, prompt: str, **headers: str) -> None:
    reply = front.client.post("/v1/completions", json={"model": "m", "prompt": prompt}, headers=headers)
    assert reply.status_code == 200


def servers_of(servers: list[Upstream], key: str) -> dict[str, set[str]]:
    """The servers by which each value of a header, or of ``prompt``, was seen."""
    found: dict[str, set[str]] = {}
    for server in servers:
        for call in server.calls:
            if (name := call.headers.get(key) or call.json.get(key)) not in (None, "p"):
                found.setdefault(name[:300], set()).add(server.url)
    return found


def test_sessions_and_prompts_go_to_the_same_server_by_any_gateway_and_after_a_restart() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(Upstream(good)) for _ in range(4)]
        first = stack.enter_context(gateway(*servers))
        with gateway(*servers[::-1]) as second:
            for number in range(24):
                for front in (first, second) if number % 2 else (second, first):
                    ask(front, "p", **{"x-session-id": f"session {number}"})
                    ask(front, f"{number} ".ljust(300, "x") + front.url)
        with gateway(*servers) as second:
            for number in range(24):
                ask(second, "p", **{"x-session-id": f"session {number}"})
                ask(second, f"{number} ".ljust(300, "x") + second.url)
        for key in ("x-session-id", "prompt"):
            found = servers_of(servers, key)
            assert all(len(urls) == 1 for urls in found.values()), key
            assert len(set[str]().union(*found.values())) == 4, "each server has some"


def test_a_client_that_another_gateway_serves_much_goes_last(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: bulk, key: sk-bulk}, {name: other, key: sk-other}]")
    keys.chmod(0o600)
    with RedisStandIn(tmp_path) as store, Upstream(answer) as other:
        shared = ("--budget-store", store.url, "--budget-store-timeout", "30")
        options = (*ONE_PLACE, "--client-keys-file", str(keys), *shared)
        server = Gate()
        with (
            Upstream(server) as upstream,
            gateway(upstream, options=options) as here,
            gateway(other, options=options) as there,
            clients(here) as start,
            clients(there) as start_there,
        ):
            requests = [start("first", "sk-bulk")]
            eventually(lambda: server.asked == ["first"])
            for prompt in ("b1", "b2", "b3", "o1", "o2", "o3"):
                waiting = queued(here, "sk-bulk")
                requests.append(start(prompt, "sk-bulk" if prompt[0] == "b" else "sk-other"))
                eventually(lambda waiting=waiting: queued(here, "sk-bulk") == waiting + 1)  # type: ignore[misc]
            asked = len(store.asked)
            eventually(lambda: len(store.asked) > asked + 2)
            for _ in range(6):
                assert start_there("p", "sk-bulk").result().status_code == 200
            eventually(lambda: sum(store.sums.values()) > 500)
            asked = len(store.asked)
            eventually(lambda: len(store.asked) > asked + 4)
            server.answer(len(requests))
            assert {each.result().status_code for each in requests} == {200}
            assert server.asked == ["first", "o1", "o2", "o3", "b1", "b2", "b3"]
            assert not any("bulk" in key for key in store.sums), "hashes"
