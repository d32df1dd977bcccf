"""How many files a process may have open: every connection is one."""

from __future__ import annotations

import contextlib
import logging
import resource

log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Takes the open files that the system allows. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS calls its hard limit infinite and refuses that; 10240 is OPEN_MAX of its sys/syslimits.h.
    for limit in (hard, 10240):
        if soft in (hard, limit):
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return
    log.warning("the limit of %d open files cannot be raised to %d", soft, hard)
