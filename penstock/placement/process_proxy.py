"""A stand-in: the supervisor's child for a process of the fleet that runs on a Ray cluster.

``python -m penstock.placement.process_proxy FD``, started like every child
(:mod:`penstock.supervisor.children.child_main`). It asks the cluster for a machine (:mod:`.placing`), starts
the process there by way of a :class:`~penstock.placement.process_actor.ProcessActor`, and passes the control
channel's messages on, both ways. So the supervisor starts, watches, stops and restarts processes of a
cluster as it does its own, and a stand-in's end is its process's: Ray ends what a driver that is gone has
started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from typing import Any

import msgspec

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_ORPHANED
from penstock.placement.actor_placement import PlacedActor, PlacementError, connect, first_line, place
from penstock.placement.process_actor import ProcessOutput
from penstock.supervisor.children.child_main import open_control_channel
from penstock.supervisor.startup.banner import base_url
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import ChildReport, Launch, LineBuffer, Ready, decode_for_supervisor, encode


class ProcessLostError(Exception):
    """The cluster, or its machine that had the process, failed; the message is for the operator."""

    def __init__(self, message: str, *, was_ready: bool) -> None:
        super().__init__(message)
        self.was_ready = was_ready


def main(fd: int) -> int:
    """Stands in for the process that the supervisor at the other end of ``fd`` asks for. Returns its exit
    code, or dies of the signal that it died of."""
    try:
        control = open_control_channel(fd, "penstock: stand-in of {}")
    except SupervisorGone:
        return EXIT_ORPHANED
    launch = control.launch
    try:
        returncode = _Proxy(control, launch).run()
    except SupervisorGone:
        return EXIT_ORPHANED
    except (PlacementError, ProcessLostError) as error:
        # What never worked would fail the same way again; a machine that is lost has a successor.
        was_ready = isinstance(error, ProcessLostError) and error.was_ready
        fatal = launch.epoch == 0 and not was_ready
        control.failed(str(error), fatal=fatal)
        return EXIT_FATAL if fatal else EXIT_FAILED
    if returncode < 0:
        os.kill(os.getpid(), signal.SIGKILL if -returncode not in _FATAL_SIGNALS else -returncode)
    return returncode


_FATAL_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGKILL}
"""Signals that end this process as they ended the other one; it has handlers for others."""


class _Proxy:
    def __init__(self, control: ControlChannel, launch: Launch) -> None:
        self._control = control
        self._launch = launch
        self._lines = LineBuffer()
        self._was_ready = False

    def run(self) -> int:
        """From the request for a machine to the process's end. Returns its exit code. Raises PlacementError,
        Lost."""
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of several processes are alike, and all count
        import ray
        from ray.exceptions import RayError

        try:
            address = self._launch.config.ray_address
            self._control.progress(f"connecting to the Ray cluster {address}")
            connect(ray, address)
            placed = place(ray, self._launch, self._control.progress)
            self._control.progress("starting on a machine of the cluster")
            ray.get(placed.actor.start.remote(encode(self._launch), listen_on=placed.address))
            orders = threading.Thread(
                target=self._pass_orders, args=(ray, placed.actor), name="orders", daemon=True
            )
            orders.start()
            return self._pass_reports(ray, placed)
        except RayError as error:
            message = f"lost by the Ray cluster: {first_line(error)}"
            raise ProcessLostError(message, was_ready=self._was_ready) from error

    def _pass_reports(self, ray: Any, placed: PlacedActor) -> int:
        while True:
            said: ProcessOutput = ray.get(placed.actor.read.remote())
            for line in self._lines.feed(said.data):
                self._control.forward(self._with_address(decode_for_supervisor(line), placed.address))
            if said.returncode is not None:
                return said.returncode

    def _with_address(self, report: ChildReport, address: str | None) -> ChildReport:
        """What the process reports; when it is ready, with the URL of one that listens on ``address``."""
        if not isinstance(report, Ready):
            return report
        self._was_ready = True
        if address is None:
            return report
        config = self._launch.config
        url = base_url((address, config.port), tls=config.ssl_certfile is not None)
        return msgspec.structs.replace(report, info=report.info | {"URL": url})

    def _pass_orders(self, ray: Any, host: Any) -> None:
        """Forwards the supervisor's orders until it is gone: then the process ends (see :mod:`parent_death`).

        One at a time, as an actor with several threads does not keep the order of its calls.
        """
        from ray.exceptions import RayError

        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll()
                for order in self._control.receive():
                    ray.get(host.write.remote(encode(order)))
        except (SupervisorGone, RayError):
            return  # that the host is lost is told by who reads


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
