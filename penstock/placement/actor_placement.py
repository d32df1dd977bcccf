"""Chooses the machine of a Ray cluster for a process, and creates the process's actor there.

An engine goes to a machine with free resources, an API server to the one that ``--api-server-hosts`` names.
Both wait for their machine: an engine's may be busy, an API server's may have left the cluster.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.exit_codes import first_line
from penstock.placement.engine_resources import resources_of
from penstock.placement.process_actor import CONCURRENCY, ProcessActor
from penstock.wire.control import Launch

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 30.0
"""Interval of log lines while waiting for a machine."""
NODE_POLL_INTERVAL_S = 1.0
"""Interval of checks for a machine's return, of which Ray sends no notice. The supervisor ends the wait after
--startup-timeout."""
CONNECT_TIMEOUT_S = 10.0

Progress = Callable[[str], None]


class PlacementError(Exception):
    """The cluster cannot be reached, or has no such machine; the message is for the operator."""


class PlacedActor(NamedTuple):
    """The handle of a :class:`~penstock.placement.process_actor.ProcessActor` actor on its machine."""

    actor: Any
    address: str | None
    """The machine's address in the cluster, on which an API server listens; None for engines."""


def connect(ray: Any, address: str) -> None:
    """Connect to the cluster as a driver. Raises PlacementError."""
    try:
        if address != "auto":
            _check_reachable(address)  # Ray itself would try for minutes
        ray.init(address=address, namespace="penstock", logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise PlacementError(f"--ray-address {address}: {first_line(error)}") from error


def place(ray: Any, launch: Launch, progress: Progress) -> PlacedActor:
    """Create the actor for the process of ``launch``, after waiting for its machine. Raises
    PlacementError."""
    if launch.role == "engine":
        return _place_engine(ray, launch, progress)
    return _place_server(ray, launch, progress)


def _place_engine(ray: Any, launch: Launch, progress: Progress) -> PlacedActor:
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = resources_of(launch.config)
    group = placement_group([wanted], name=f"penstock {launch.name}")
    _wait_for(ray, group, wanted, progress)
    others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    actor = ray.remote(ProcessActor).options(
        num_cpus=wanted.get("CPU", 0),
        num_gpus=wanted.get("GPU", 0),
        resources=others,
        max_concurrency=CONCURRENCY,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    )
    return PlacedActor(actor.remote(), None)


def _wait_for(ray: Any, group: Any, wanted: Mapping[str, float], progress: Progress) -> None:
    text = ",".join(f"{name}={amount:g}" for name, amount in wanted.items())
    progress(f"waiting for a machine with {text} free")
    while not group.wait(PROGRESS_INTERVAL_S):
        free = ray.available_resources()
        total = ", ".join(f"{name} {free.get(name, 0):g}" for name in wanted)
        log.info(
            "waits for a machine with %s free (--engine-resources); free in the cluster: %s", text, total
        )


def _place_server(ray: Any, launch: Launch, progress: Progress) -> PlacedActor:
    """The actor takes none of the machine's resources, so that the machine always has room for it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    name = launch.config.host_of_server(launch.index)
    node = _find_node(name, ray.nodes())
    if node is None and launch.epoch == 0:
        there = ", ".join(sorted({_shown(node) for node in ray.nodes() if node["Alive"]}))
        raise PlacementError(f"--api-server-hosts {name}: the cluster has no such machine; it has {there}")
    node = node or _wait_for_machine(ray, name, progress)
    actor = ray.remote(ProcessActor).options(
        num_cpus=0,
        max_concurrency=CONCURRENCY,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    )
    return PlacedActor(actor.remote(), node["NodeManagerAddress"])


def _wait_for_machine(ray: Any, name: str, progress: Progress) -> Mapping[str, Any]:
    progress(f"waiting for the machine {name} to be in the cluster again")
    logged_at = -math.inf
    while (node := _find_node(name, ray.nodes())) is None:
        if time.monotonic() >= logged_at + PROGRESS_INTERVAL_S:
            logged_at = time.monotonic()
            log.info("waits for the machine %s to be in the cluster again (--api-server-hosts)", name)
        time.sleep(NODE_POLL_INTERVAL_S)
    return node


def _find_node(name: str, nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The living node that has ``name`` as its id, name, address or host name, in Ray's terms; the one with
    the lowest id if there are several."""
    found = [node for node in nodes if node["Alive"] and name in _names(node)]
    return min(found, key=lambda node: str(node["NodeID"]), default=None)


def _names(node: Mapping[str, Any]) -> tuple[str, ...]:
    return node["NodeID"], node["NodeName"], node["NodeManagerAddress"], node["NodeManagerHostname"]


def _shown(node: Mapping[str, Any]) -> str:
    name, address = node["NodeName"], node["NodeManagerAddress"]
    return str(address) if name == address else f"{name} ({address})"


def _check_reachable(address: str) -> None:
    """Raises OSError when nothing listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
