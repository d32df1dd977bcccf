"""Gateways that share nothing, in front of the same servers."""

from __future__ import annotations

from contextlib import ExitStack

from tests.gateway.behaviours import good
from tests.gateway.processes import Gateway, Upstream, gateway


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
