"""The directories that API servers share, made before these start, and the secret that one of them holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.response_store_directory import response_store_directory
from penstock.supervisor.startup.run_directory import RunDirectory
from penstock.supervisor.startup.seal_key import seal_key

MEMORY = "/dev/shm"
MAX_PATH_BYTES = 4096
"""It holds no sockets, whose paths are short."""


class ApiServerDirectories(NamedTuple):
    """Absolute paths; None: there is none."""

    responses: str | None = None
    """Where responses are stored."""
    weights: str | None = None
    """Where weights that trainers broadcast are kept."""
    seal_key: bytes = b""
    """The secret that seals summaries; empty: none is shared."""


@contextlib.contextmanager
def api_server_directories(config: ServeConfig, run_dir: str) -> Iterator[ApiServerDirectories]:
    """Those that the options want. Raises StartupError, and ConfigError for one that an option names."""
    with weights_directory(config) as weights, response_store_directory(config, run_dir) as responses:
        yield ApiServerDirectories(responses, weights, seal_key(config, responses))


@contextlib.contextmanager
def weights_directory(config: ServeConfig) -> Iterator[str]:
    """A directory of this server alone, in --weights-dir or in memory; it is removed at the end, and those
    that killed servers left behind at the start. Raises StartupError, and ConfigError for one that cannot be
    written to."""
    given = config.weights_dir
    if given is None:
        parent = MEMORY
    else:
        parent = os.path.abspath(os.path.expanduser(given))
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
            raise ConfigError(f"--weights-dir {given}: is no directory that can be written to")
    with RunDirectory(None, [parent], MAX_PATH_BYTES) as directory:
        yield directory.path
