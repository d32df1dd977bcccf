"""The entry of every child process: ``python -m penstock.supervisor.children.child_main FD``.

FD is the child's end of the control channel. Its first message, Launch, gives the role; the role's own
package does the rest. Only the code of that role is imported: an API server never loads torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import zmq
from setproctitle import setproctitle

from penstock import logging_setup
from penstock.config.errors import ConfigError
from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_ORPHANED, is_exhausted
from penstock.metrics.gc_policy import frozen
from penstock.supervisor.signals import dump_tracebacks_of_crashes, leave_signals_to_supervisor
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import GatewayLaunch, Launch, Role
from penstock.wire.coordination import JoinRejectedError
from penstock.wire.vllm.messages import EngineLost

log = logging.getLogger(__name__)


def main(fd: int, role_main: Callable[[Role], Callable[[ControlChannel], int]] | None = None) -> int:
    """Run the role that the supervisor at the other end of ``fd`` asks for; return the exit code.

    ``role_main`` gives the main function of a role; tests pass their own.
    """
    try:
        control = open_control_channel(fd)
    except SupervisorGone:
        return EXIT_ORPHANED
    launch = control.any_launch
    dump_tracebacks_of_crashes()
    try:
        return (role_main or import_role_main)(launch.role)(control)
    except SupervisorGone:
        return EXIT_ORPHANED
    except Exception as error:
        if not _is_plain(error):  # the supervisor logs it in one line
            log.exception("%s ends because of an error", launch.name)
        # A first start would fail again with the same options on the same machine; a restart may have met
        # something that passes (its predecessor's memory is not free yet).
        fatal = isinstance(error, JoinRejectedError) or (launch.epoch == 0 and not control.reported_ready)
        # Another engine of vLLM's may be attached next.
        fatal = fatal and not (control.reported_ready and _attaches(launch))
        control.failed(_reason(error), fatal=fatal)
        return EXIT_FATAL if fatal else EXIT_FAILED


def _is_plain(error: Exception) -> bool:
    """Whether the message of an error says all, without a traceback."""
    if isinstance(error, EngineLost):
        return True
    if isinstance(error, OSError | zmq.ZMQError):
        return is_exhausted(error.errno)
    return isinstance(error, ConfigError | JoinRejectedError)


def _reason(error: Exception) -> str:
    """What the supervisor logs."""
    if isinstance(error, EngineLost):
        return f"vLLM's engine is lost: {error}"
    return f"{type(error).__name__}: {error}"


def _attaches(launch: Launch | GatewayLaunch) -> bool:
    """Whether the process is one that attaches an engine."""
    return isinstance(launch, Launch) and launch.role == "engine" and launch.config.attach is not None


def open_control_channel(fd: int, title: str = "penstock: {}") -> ControlChannel:
    """The control channel of a child, with its Launch received and title, logs and signals set up.

    ``title`` is a format of the process title, given role and number. Raises SupervisorGone.
    """
    leave_signals_to_supervisor()
    control = ControlChannel(fd)
    launch = control.any_launch
    setproctitle(title.format(launch.name))
    logging_setup.configure(launch.name, launch.config.log_level, launch.config.log_format)
    return control


def import_role_main(role: Role) -> Callable[[ControlChannel], int]:
    """The main function of ``role``."""
    with frozen():
        return _import_role_main(role)


def _import_role_main(role: Role) -> Callable[[ControlChannel], int]:
    if role == "api-server":
        from penstock.api.process import run
    elif role == "coordinator":
        from penstock.coordinator.process import run
    elif role == "media-worker":
        from penstock.media.process import run
    else:
        from penstock.engine.loop.process import run
    return run


def exit_process(code: int) -> NoReturn:
    """Exit at once, after flushing logs and output. The interpreter's own exit collects garbage first, for
    seconds where a model's libraries are loaded, while the supervisor waits to start a successor."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1])))
