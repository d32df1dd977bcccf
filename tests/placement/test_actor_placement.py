"""Where API servers go, in a cluster that the test describes."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any, Self

import pytest

from penstock.config.serve import ServeConfig
from penstock.placement import actor_placement
from penstock.placement.actor_placement import PlacedActor, PlacementError, place
from penstock.wire.control import Launch
from tests.launches import launch


class Cluster:
    """What Ray's module is to :func:`place`. Each look at the nodes shows the next of ``views``, then the
    last one."""

    def __init__(self, *views: Sequence[dict[str, Any]]) -> None:
        self._views = list(views)
        self.options_of_actor: dict[str, Any] = {}

    def nodes(self) -> Sequence[dict[str, Any]]:
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]

    # -- an actor

    def remote(self, *_: Any) -> Any:
        return self if not self.options_of_actor else "the actor"

    def options(self, **options: Any) -> Self:
        self.options_of_actor = options
        return self


def node(number: int, *, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": f"id{number}",
        "NodeName": f"name{number}",
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"host{number}",
        "Alive": alive,
    }


def api_server(hosts: str, index: int = 0, epoch: int = 0) -> Launch:
    count = len(hosts.split(","))
    config = ServeConfig(
        data_parallel_backend="ray",
        coordinator="tcp://10.0.0.1:7000",
        cluster_key_file="/unread",
        api_server_hosts=hosts,
        api_server_count=count,
    )
    return launch("api-server", index=index, epoch=epoch, config=config, api_server_count=count)


@pytest.fixture(autouse=True)
def strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray need not be installed."""
    module = types.ModuleType("ray.util.scheduling_strategies")
    vars(module)["NodeAffinitySchedulingStrategy"] = lambda node_id, soft: (node_id, soft)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", module)
    monkeypatch.setattr(actor_placement, "NODE_POLL_INTERVAL_S", 0.0)


def said_nothing(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("name", ["id2", "name2", "10.0.0.2", "host2"])
def test_a_machine_by_any_of_its_names(name: str) -> None:
    ray = Cluster([node(1), node(2), node(3)])
    assert place(ray, api_server(name), said_nothing) == PlacedActor("the actor", "10.0.0.2")
    assert ray.options_of_actor["scheduling_strategy"] == ("id2", False)
    assert ray.options_of_actor["num_cpus"] == 0


def test_api_servers_are_dealt_out_and_replacements_stay() -> None:
    hosts = "name3,name1"
    for index, address in enumerate(("10.0.0.3", "10.0.0.1", "10.0.0.3", "10.0.0.1")):
        ray = Cluster([node(1), node(3)])
        assert place(ray, api_server(hosts, index), said_nothing).address == address


def test_a_machine_that_never_was_there_is_an_error() -> None:
    nodes = [node(1), node(2, alive=False), node(3) | {"NodeName": "10.0.0.3"}]
    with pytest.raises(PlacementError, match=r"no such machine; it has 10\.0\.0\.3, name1 \(10\.0\.0\.1\)$"):
        place(Cluster(nodes), api_server("name2"), said_nothing)


def test_one_that_was_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    gone, back = [node(1), node(2, alive=False)], [node(2, alive=False), node(2) | {"NodeID": "id9"}]
    ray = Cluster(gone, gone, gone, back)
    progress: list[str] = []
    assert place(ray, api_server("name2", epoch=1), progress.append).address == "10.0.0.2"
    assert ray.options_of_actor["scheduling_strategy"] == ("id9", False)
    assert progress == ["waiting for the machine name2 to be in the cluster again"]
    assert len(caplog.messages) == 1
