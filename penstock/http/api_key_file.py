"""Loads API keys from --api-key and --api-key-file."""

from __future__ import annotations

import logging
import re
from typing import TypeVar

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.serve import ServeConfig

log = logging.getLogger(__name__)

_KEY = re.compile(r"[!-~]+")
"""Visible ASCII without spaces, which a header carries unchanged."""


Config = TypeVar("Config", ServeConfig, GatewayConfig)


def load_api_keys(config: Config, origins: Origins) -> Config:
    """``config`` with the keys of --api-key-file added to those of --api-key, without duplicates.

    Raises ConfigError, whose message shows no key, for a file that cannot be read or has no key, and for a
    key that no client could send.
    """
    keys = {f"--api-key: key {number}": key for number, key in enumerate(config.api_key or (), 1)}
    if "api_key" in origins and origins["api_key"].source == "command line":
        log.warning(
            "--api-key: a command line can be read by every user of this machine while the server starts, "
            "and stays in the shell's history; --api-key-file and PENSTOCK_API_KEY do not"
        )
    if config.api_key_file is not None:
        keys |= _read(config.api_key_file)
    for origin, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{origin} has characters other than visible ASCII, no client could send it")
    return msgspec.structs.replace(config, api_key=list(dict.fromkeys(keys.values())) or None)


def _read(path: str) -> dict[str, str]:
    """Origin of each key, such as its line → key. Empty lines and comments (#) are skipped."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from error
    warn_if_open_to_others("--api-key-file", path)
    keys = {
        f"--api-key-file {path}: line {number}": line
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    }
    if not keys:
        raise ConfigError(f"--api-key-file {path}: there is no key in it; allowed: one per line")
    return keys
