"""The directory of stored responses, made before the API servers that share it start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.exit_codes import StartupError
from penstock.store.database import StoreError, create
from penstock.supervisor.startup.run_directory import RunDirectory

MEMORY = "/dev/shm"
_NAME = "responses"


@contextlib.contextmanager
def response_store_directory(config: ServeConfig, run_dir: str) -> Iterator[str | None]:
    """The directory by --response-store; None if responses are not stored. One in memory, and what it holds,
    is removed at the end. Raises StartupError, and ConfigError for one that an option names."""
    with contextlib.ExitStack() as owned:
        if config.response_store == "off":
            yield None
            return
        if config.response_store == "memory":
            directory = Path(owned.enter_context(RunDirectory(None, [MEMORY])).path) / _NAME
        elif config.response_store_dir is not None:
            directory = Path(config.response_store_dir).expanduser().absolute()
        else:
            directory = Path(run_dir) / _NAME
        try:
            create(directory)
        except StoreError as error:
            if config.response_store_dir is not None:
                raise ConfigError(f"--response-store-dir {config.response_store_dir}: {error}") from None
            raise StartupError(f"response store {directory}: {error}") from None
        yield str(directory)
