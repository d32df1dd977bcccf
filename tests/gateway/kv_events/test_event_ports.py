"""``--kv-events``: where endpoints publish."""

from __future__ import annotations

import pytest

from penstock.config.errors import ConfigError
from penstock.gateway.kv_events.followed_caches import EventPorts
from penstock.gateway.routing.endpoint import Endpoint


def addresses(ports: EventPorts, url: str, destination: str = "") -> list[tuple[int, str, str | None]]:
    found = ports.addresses(Endpoint(url, destination=destination))
    return [(each.source.rank, each.events, each.replay) for each in found]


def test_each_rank_has_ports_of_its_own() -> None:
    ports = EventPorts(["5557:6557", "http://b:8000/=7000"], ranks=2)
    assert addresses(ports, "http://a:8000", "10.0.0.1:8000") == [
        (0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557"),
        (1, "tcp://10.0.0.1:5558", "tcp://10.0.0.1:6558"),
    ]
    assert addresses(ports, "http://b:8000") == [(0, "tcp://b:7000", None), (1, "tcp://b:7001", None)]
    assert addresses(ports, "http://[::1]:80", "[::1]:80")[0][1] == "tcp://[::1]:5557"
    assert addresses(ports, "http://[::1]")[0][1] == "tcp://[::1]:5557"


def test_without_ports_for_all_others_are_not_followed() -> None:
    ports = EventPorts(["http://b:8000=7000"], ranks=1)
    assert addresses(ports, "http://a:8000") == []
    assert addresses(ports, "http://b:8000") == [(0, "tcp://b:7000", None)]


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["0"], "--kv-events 0: a port is between 1 and 65533"),
        (["5557:65534"], "--kv-events 5557:65534: a port is between 1 and 65533"),
        (["5557:5559"], "--kv-events 5557:5559: with 3 ranks the two ports are at least 3 apart"),
        (["5559:5557"], "--kv-events 5559:5557: with 3 ranks the two ports are at least 3 apart"),
        (["a"], r"--kv-events a: it takes \[URL=\]PORT or \[URL=\]PORT:REPLAY_PORT"),
        (["1", "2"], "--kv-events 2: the port of all others is given twice"),
        (["http://b=1", "http://b/=2"], "--kv-events http://b/=2: the port of http://b is given twice"),
    ],
)
def test_a_bad_value_is_named(texts: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EventPorts(texts, ranks=3)
