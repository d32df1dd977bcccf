"""An engine's stand-in: the supervisor's child for an engine that runs on a Ray cluster.

``python -m penstock.placement.stand_in FD``, started like every child (:mod:`penstock.supervisor.child`).
It asks the cluster for the engine's resources, starts an :class:`~penstock.placement.host.EngineHost` there,
and passes the control channel's messages on, both ways. So the supervisor starts, watches, stops and restarts
engines of a cluster as it does its own, and a stand-in's end is its engine's: Ray ends what a driver that is
gone has started.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from ..supervisor.child import begun
from ..supervisor.exits import EXIT_FAILED, EXIT_FATAL, EXIT_ORPHANED
from ..wire.channel import ControlChannel, SupervisorGone
from ..wire.control import Launch, LineBuffer, Ready, decode_for_supervisor, encode
from .host import CONCURRENCY, EngineHost, Said
from .resources import resources_of

log = logging.getLogger(__name__)

NEWS_INTERVAL_S = 30.0
"""How often a stand-in that waits for the cluster's resources says so."""


CONNECT_S = 10.0


class Elsewhere(Exception):
    """The cluster, or its machine that had the engine, failed; the message is for the operator."""

    def __init__(self, message: str, *, was_ready: bool = False) -> None:
        super().__init__(message)
        self.was_ready = was_ready


def main(fd: int) -> int:
    """Stands in for the engine that the supervisor at the other end of ``fd`` asks for. Returns the engine's
    exit code, or dies of the signal that it died of."""
    try:
        control = begun(fd, "penstock: stand-in of {}")
    except SupervisorGone:
        return EXIT_ORPHANED
    launch = control.launch
    try:
        returncode = _StandIn(control, launch).run()
    except SupervisorGone:
        return EXIT_ORPHANED
    except Elsewhere as error:
        # What never worked would fail the same way again; a machine that is lost has a successor.
        fatal = launch.epoch == 0 and not error.was_ready
        control.failed(str(error), fatal=fatal)
        return EXIT_FATAL if fatal else EXIT_FAILED
    if returncode < 0:
        os.kill(os.getpid(), signal.SIGKILL if -returncode not in _DEADLY else -returncode)
    return returncode


_DEADLY = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGKILL}
"""Signals that end this process as they ended the engine; it has handlers for others."""


class _StandIn:
    def __init__(self, control: ControlChannel, launch: Launch) -> None:
        self._control = control
        self._launch = launch
        self._lines = LineBuffer()
        self._was_ready = False

    def run(self) -> int:
        """From the request for resources to the engine's end. Returns its exit code. Raises Elsewhere."""
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of several engines are alike, and all count
        import ray
        from ray.exceptions import RayError

        try:
            self._connect(ray)
            host = self._place(ray)
            self._control.progress("starting on a machine of the cluster")
            ray.get(host.start.remote(encode(self._launch)))
            threading.Thread(target=self._pass_orders, args=(host,), name="orders", daemon=True).start()
            while True:
                said: Said = ray.get(host.read.remote())
                for line in self._lines.feed(said.data):
                    report = decode_for_supervisor(line)
                    self._was_ready = self._was_ready or isinstance(report, Ready)
                    self._control.pass_on(report)
                if said.returncode is not None:
                    return said.returncode
        except RayError as error:
            message = f"lost by the Ray cluster: {_first_line(error)}"
            raise Elsewhere(message, was_ready=self._was_ready) from error

    def _connect(self, ray: Any) -> None:
        address = self._launch.config.ray_address
        self._control.progress(f"connecting to the Ray cluster {address}")
        try:
            if address != "auto":
                _knock(address)  # Ray itself would try for minutes
            ray.init(address=address, namespace="penstock", logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            raise Elsewhere(f"--ray-address {address}: {_first_line(error)}") from error

    def _place(self, ray: Any) -> Any:
        """The actor, on a machine that has its resources. Waits until there is one."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = resources_of(self._launch.config)
        group = placement_group([wanted], name=f"penstock engine {self._launch.index}")
        self._wait_for(ray, group, wanted)
        others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
        actor = ray.remote(EngineHost).options(
            num_cpus=wanted.get("CPU", 0),
            num_gpus=wanted.get("GPU", 0),
            resources=others,
            max_concurrency=CONCURRENCY,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        return actor.remote()

    def _wait_for(self, ray: Any, group: Any, wanted: dict[str, float]) -> None:
        text = ",".join(f"{name}={amount:g}" for name, amount in wanted.items())
        self._control.progress(f"waiting for a machine with {text} free")
        while not group.wait(NEWS_INTERVAL_S):
            free = ray.available_resources()
            there = ", ".join(f"{name} {free.get(name, 0):g}" for name in wanted)
            log.info("waits for a machine with %s free (--engine-resources); in all there is %s", text, there)

    def _pass_orders(self, host: Any) -> None:
        """The supervisor's, until it is gone: then the process ends, see penstock.supervisor.orphans."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll()
                for order in self._control.receive():
                    host.write.remote(encode(order))
        except SupervisorGone:
            return


def _knock(address: str) -> None:
    """Raises OSError when nobody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
