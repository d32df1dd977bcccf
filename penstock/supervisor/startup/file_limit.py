"""Raises the limit of open files; every connection is one."""

from __future__ import annotations

import contextlib
import logging
import resource

log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raises RLIMIT_NOFILE to its hard limit. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports an infinite hard limit but refuses it; 10240 is OPEN_MAX of its sys/syslimits.h.
    for limit in (hard, 10240):
        if soft in (hard, limit):
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return
    log.warning("the limit of %d open files cannot be raised to %d", soft, hard)
