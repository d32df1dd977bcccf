"""The entry of a worker: ``python -m penstock.gateway.worker_main FD``, FD as for other children."""

from __future__ import annotations

import sys
from collections.abc import Callable

from penstock.supervisor.children.child_main import exit_process, main
from penstock.wire.channel import ControlChannel
from penstock.wire.control import Role


def import_run(role: Role) -> Callable[[ControlChannel], int]:
    """The main function of a worker, the only role. Imported late: the supervisor may end meanwhile."""
    from penstock.gateway.process import run

    return run


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1]), import_run))
