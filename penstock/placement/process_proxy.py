"""The supervisor's child for a process on a Ray cluster; its process title says "stand-in of …".

``python -m penstock.placement.process_proxy FD``, started like every child
(:mod:`penstock.supervisor.children.child_main`). It waits for a machine of the cluster
(:mod:`penstock.placement.actor_placement`), starts the process there through a
:class:`~penstock.placement.process_actor.ProcessActor`, and forwards the control channel's messages in both
directions. So the supervisor starts, watches, stops and restarts processes of a cluster like its own. The
proxy exits as its process does, and when the proxy ends, Ray ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from typing import Any

import msgspec

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_ORPHANED, first_line
from penstock.placement.actor_placement import PlacedActor, PlacementError, connect, place
from penstock.placement.process_actor import ProcessOutput
from penstock.supervisor.children.child_main import open_control_channel
from penstock.supervisor.startup.banner import base_url
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import ChildReport, Launch, LineBuffer, Ready, decode_for_supervisor, encode


class ProcessLostError(Exception):
    """The cluster or the machine of the process failed; the message is for the operator."""

    def __init__(self, message: str, *, was_ready: bool) -> None:
        super().__init__(message)
        self.was_ready = was_ready


def main(fd: int) -> int:
    """Run the process that the supervisor at the other end of ``fd`` asks for. Returns its exit code, or
    ends by the signal that it ended by."""
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
        # A process that was never ready would fail the same way again; one that was may find another machine.
        was_ready = isinstance(error, ProcessLostError) and error.was_ready
        fatal = launch.epoch == 0 and not was_ready
        control.failed(str(error), fatal=fatal)
        return EXIT_FATAL if fatal else EXIT_FAILED
    if returncode < 0:
        os.kill(os.getpid(), signal.SIGKILL if -returncode not in _FATAL_SIGNALS else -returncode)
    return returncode


_FATAL_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGKILL}
"""Signals that end this process too; it has handlers for the others, and takes SIGKILL instead."""


class _Proxy:
    def __init__(self, control: ControlChannel, launch: Launch) -> None:
        self._control = control
        self._launch = launch
        self._lines = LineBuffer()
        self._was_ready = False

    def run(self) -> int:
        """From the request for a machine to the process's exit; return its exit code. Raises PlacementError,
        ProcessLostError."""
        os.environ.setdefault(
            "RAY_DEDUP_LOGS", "0"
        )  # equal log lines of several processes are not duplicates
        import ray
        from ray.exceptions import RayError

        try:
            address = self._launch.config.ray_address
            self._control.progress(f"connecting to the Ray cluster {address}")
            connect(ray, address)
            placed = place(ray, self._launch, self._control.progress)
            self._control.progress("starting on a machine of the cluster")
            ray.get(placed.actor.start.remote(encode(self._launch), listen_on=placed.address))
            commands = threading.Thread(
                target=self._forward_commands, args=(ray, placed.actor), name="commands", daemon=True
            )
            commands.start()
            return self._forward_reports(ray, placed)
        except RayError as error:
            message = f"lost by the Ray cluster: {first_line(error)}"
            raise ProcessLostError(message, was_ready=self._was_ready) from error

    def _forward_reports(self, ray: Any, placed: PlacedActor) -> int:
        """Forward the process's reports until it exits; return its exit code."""
        while True:
            output: ProcessOutput = ray.get(placed.actor.read.remote())
            for line in self._lines.feed(output.data):
                self._control.forward(self._with_address(decode_for_supervisor(line), placed.address))
            if output.returncode is not None:
                return output.returncode

    def _with_address(self, report: ChildReport, address: str | None) -> ChildReport:
        """Add the URL to the Ready report of an API server, which listens on ``address``."""
        if not isinstance(report, Ready):
            return report
        self._was_ready = True
        if address is None:
            return report
        config = self._launch.config
        url = base_url((address, config.port), tls=config.ssl_certfile is not None)
        return msgspec.structs.replace(report, info=report.info | {"URL": url})

    def _forward_commands(self, ray: Any, actor: Any) -> None:
        """Forward the supervisor's commands until the supervisor ends, and this process with it.

        One at a time, because an actor with several threads does not keep the order of its calls.
        """
        from ray.exceptions import RayError

        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll()
                for command in self._control.receive():
                    ray.get(actor.write.remote(encode(command)))
        except (SupervisorGone, RayError):
            return  # _forward_reports raises the same RayError


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
