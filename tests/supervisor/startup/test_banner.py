from __future__ import annotations

import pytest

from penstock import __version__
from penstock.config.serve import ServeConfig
from penstock.http.sockets.listener import Address
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.startup.banner import banner, banner_facts, base_url
from penstock.wire.control import Info

PIDS = {
    ProcessName("engine", 0): 13,
    ProcessName("engine", 1): 14,
    ProcessName("api-server", 0): 11,
    ProcessName("api-server", 1): 12,
}


def text(
    config: ServeConfig, infos: dict[ProcessName, Info], address: Address | None = ("127.0.0.1", 8123)
) -> str:
    return banner(
        banner_facts(
            config,
            address=address,
            served_model_names=["tiny", "small"],
            model_dir="/models/tiny-llama",
            supervisor_pid=10,
            pids=PIDS,
            infos=infos,
        )
    )


def test_says_everything_once() -> None:
    engines: dict[ProcessName, Info] = {
        ProcessName("engine", rank): {"device": "cpu", "kv blocks": 1200, "graphs": False} for rank in (0, 1)
    }
    assert text(ServeConfig(api_key=["topsecret"]), engines).splitlines() == [
        f"penstock {__version__}",
        "  model      tiny, small (/models/tiny-llama)",
        "  engine     torch: device cpu, kv blocks 1,200, graphs off",
        "  processes  supervisor 10, 2 api-servers 11 12, 2 engines 13 14",
        "  URL        http://127.0.0.1:8123/v1",
        "  metrics    http://127.0.0.1:8123/metrics",
        "  page       http://127.0.0.1:8123/",
        "  API key    required",
    ]


def test_engines_that_differ_are_told_apart() -> None:
    infos: dict[ProcessName, Info] = {
        ProcessName("engine", 0): {"device": "cuda:0"},
        ProcessName("engine", 1): {"device": "cuda:1"},
    }
    assert "engine     torch; engine 0: device cuda:0; engine 1: device cuda:1" in text(ServeConfig(), infos)


def test_an_engine_that_says_nothing() -> None:
    lines = text(ServeConfig(engine="synthetic"), {}).splitlines()
    assert "  engine     synthetic" in lines
    assert "  API key    off, anybody who can connect may use the server" in lines


def test_a_server_on_every_address_says_so() -> None:
    assert "URL        http://127.0.0.1:8123/v1 (on every address of this machine)" in text(
        ServeConfig(), {}, ("0.0.0.0", 8123)
    )


def test_a_unix_socket_and_tls() -> None:
    lines = text(ServeConfig(uds="/run/p.sock"), {}, "/run/p.sock").splitlines()
    assert "  URL        http://localhost/v1 (over the unix socket /run/p.sock)" in lines
    assert "  metrics    http://localhost/metrics" in lines
    assert "URL        https://127.0.0.1:8123/v1\n" in text(ServeConfig(ssl_certfile="chain.pem"), {})


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        (("0.0.0.0", 8000), "http://127.0.0.1:8000"),
        (("::", 8000), "http://[::1]:8000"),
        (("fe80::1", 8000), "http://[fe80::1]:8000"),
        ("/run/p.sock", "http://localhost"),
    ],
)
def test_url_for_clients_on_the_same_machine(address: Address, url: str) -> None:
    assert base_url(address) == url
    assert base_url(address, tls=True) == url.replace("http:", "https:")


@pytest.mark.parametrize("here", [True, False])
def test_api_servers_on_other_hosts_have_urls_of_their_own(here: bool) -> None:
    infos: dict[ProcessName, Info] = {
        ProcessName("api-server", n): {"URL": f"http://10.0.0.{n}:8123"} for n in (2, 3)
    }
    lines = text(ServeConfig(), infos, ("127.0.0.1", 8123) if here else None).splitlines()
    others = "http://10.0.0.2:8123/v1, http://10.0.0.3:8123/v1"
    assert f"  URL        {'http://127.0.0.1:8123/v1, ' if here else ''}{others}" in lines
    assert f"  metrics    http://{'127.0.0.1' if here else '10.0.0.2'}:8123/metrics" in lines
