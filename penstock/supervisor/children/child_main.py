"""The entry of every child process: ``python -m penstock.supervisor.children.child_main FD``.

FD is the child's end of the control channel. The first message on it says what to run as; the role's own
package does the rest. Only the code of that role is imported: an API server never loads torch.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from setproctitle import setproctitle

from penstock import logging_setup
from penstock.config.errors import ConfigError
from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_ORPHANED
from penstock.supervisor.children import parent_death
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import Role
from penstock.wire.coordination import JoinRejectedError

log = logging.getLogger(__name__)

_SUPERVISOR_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(fd: int, role_main: Callable[[Role], Callable[[ControlChannel], int]] | None = None) -> int:
    """Runs the role that the supervisor at the other end of ``fd`` asks for; returns the exit code.

    ``role_main`` gives the main function of a role; tests pass their own.
    """
    try:
        control = open_control_channel(fd)
    except SupervisorGone:
        return EXIT_ORPHANED
    launch = control.launch
    faulthandler.enable()
    try:
        return (role_main or import_role_main)(launch.role)(control)
    except SupervisorGone:
        return EXIT_ORPHANED
    except Exception as error:
        if not isinstance(error, ConfigError | JoinRejectedError):  # the supervisor says it in a line
            log.exception("%s ends because of an error", launch.name)
        # At a first start it is the same options on the same machine again; a child that worked before
        # may meet something that passes (memory of its predecessor that is not free yet).
        fatal = isinstance(error, JoinRejectedError) or (launch.epoch == 0 and not control.reported_ready)
        control.failed(f"{type(error).__name__}: {error}", fatal=fatal)
        return EXIT_FATAL if fatal else EXIT_FAILED


def open_control_channel(fd: int, title: str = "penstock: {}") -> ControlChannel:
    """The control channel of a child that knows what to run as, and ends with its supervisor.

    ``title`` is the process's, given the role and number. Raises SupervisorGone.
    """
    _ignore_signals()
    control = ControlChannel(fd)
    launch = control.launch
    setproctitle(title.format(launch.name))
    logging_setup.configure(launch.name, launch.config.log_level)
    parent_death.exit_with_supervisor(launch.supervisor_pid, control.fileno())
    return control


def import_role_main(role: Role) -> Callable[[ControlChannel], int]:
    """The main function of ``role``."""
    if role == "api-server":
        from penstock.api.process import run
    elif role == "coordinator":
        from penstock.coordinator.process import run
    else:
        from penstock.engine.loop.process import run
    return run


def _ignore_signals() -> None:
    """Terminals and service managers signal the whole group; only the supervisor decides what follows.

    Handlers that do nothing, not SIG_IGN: programs that this process starts get the default back. The
    supervisor has SIGINT blocked while it starts a child, so that none comes before this.
    """
    for signum in _SUPERVISOR_SIGNALS:
        signal.signal(signum, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SUPERVISOR_SIGNALS)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    pass


def exit_process(code: int) -> NoReturn:
    """Everything is closed and told. Leaving through the interpreter would collect garbage first, for
    seconds where a model's libraries are loaded, while the supervisor waits to start a successor."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1])))
