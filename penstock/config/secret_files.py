"""Files that hold secrets: a warning when other users of the machine can read or replace them."""

from __future__ import annotations

import logging
import os
import stat

log = logging.getLogger(__name__)


def warn_if_open_to_others(option: str, path: str) -> None:
    """Warn about the file of an option, such as ``--api-key-file``; nothing if it cannot be examined."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if mode & stat.S_IROTH:
        log.warning("%s %s can be read by every user of this machine; chmod o-r it", option, path)
    if mode & stat.S_IWOTH:
        log.warning("%s %s can be replaced by every user of this machine; chmod o-w it", option, path)
