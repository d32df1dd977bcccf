"""The versions of vLLM whose engines can be attached.

The messages carry no version: an engine tells its own when it is ready. All these versions have the same
fields at the places that are read (:class:`.messages.Output`, :class:`.messages.Outputs`); later ones have
appended others.
"""

from __future__ import annotations

import logging
import re

from penstock.config.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 27), (0, 33)
"""Minor versions, with any patch level. Change these after a run of ``make test-vllm`` only."""
_NUMBERS = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
SUPPORTED = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def takes_hints(version: str) -> bool:
    """Whether an engine knows session_id and kv_hints of requests, as from 0.32 on."""
    match = _NUMBERS.match(version)
    return match is None or (int(match[1]), int(match[2])) >= (0, 32)


def takes_type_ranges(version: str) -> bool:
    """Whether an engine wants to know where the second text of a pair ends, as from 0.33 on; before that it
    takes the index of its first token."""
    match = _NUMBERS.match(version)
    return match is None or (int(match[1]), int(match[2])) >= (0, 33)


def check_version(version: str, rank: int) -> None:
    """Raises ConfigError for an engine that is older than any supported one. Logs a warning for a newer one,
    or a build without a number, whose messages are read as those of the newest."""
    match = _NUMBERS.match(version)
    found = None if match is None else (int(match[1]), int(match[2]))
    if found is not None and found < OLDEST:
        raise ConfigError(
            f"engine {rank} is vLLM {version[:80]}; supported are {SUPPORTED}, and later versions "
            "as far as they only append to messages"
        )
    if found is None or found > NEWEST:
        log.warning(
            "engine %d is vLLM %s, which has not been tested; its messages are read as those of %s",
            rank,
            version[:80],
            ".".join(map(str, NEWEST)),
        )
