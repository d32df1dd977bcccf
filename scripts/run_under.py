"""Runs a command as on a machine that has been up for another time, or beside processes that take the CPUs.

A test's verdict must depend on neither: ``run_under.py --uptime 2030 --burners 4 -- python -m pytest tests``.
The monotonic clock is that of a Linux time namespace, so that children, and libraries in C, have it too;
unshare(1) makes one where user namespaces are allowed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"


def in_time(uptime_s: float) -> list[str]:
    """The beginning of a command whose monotonic clock starts at ``uptime_s``."""
    offset = round(uptime_s - time.clock_gettime(time.CLOCK_BOOTTIME))
    shift = [f"--monotonic={offset}", f"--boottime={offset}"]
    namespaces = ["--time"] if os.geteuid() == 0 else ["--user", "--map-current-user", "--time"]
    return ["unshare", *namespaces, *shift, "--"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--uptime", type=float, help="seconds since the start of the machine, as the command sees them"
    )
    parser.add_argument("--burners", type=int, default=0, help="processes that compute all the time")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which the command is killed")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    command = [*([] if options.uptime is None else in_time(options.uptime)), *options.command]
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(options.burners)]
    try:
        return subprocess.run(command, timeout=options.limit).returncode
    except subprocess.TimeoutExpired as error:
        print(error, file=sys.stderr)
        return 124
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    sys.exit(main())
