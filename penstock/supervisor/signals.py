"""Whether SIGHUP is an order, or the terminal of this process was closed."""

from __future__ import annotations

import os


def has_controlling_terminal() -> bool:
    """Whether this process has a controlling terminal; a terminal that was closed is none any longer."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
