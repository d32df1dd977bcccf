"""Loads API keys from --api-key, --api-key-file and the same of administrators."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TypeVar

from penstock.config.describe import KEY_PATTERN
from penstock.config.errors import ConfigError, Problems
from penstock.config.options.keys import KeyOptions
from penstock.config.origins import Origins
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.watched_file import TextFiles

log = logging.getLogger(__name__)

_KEY = re.compile(KEY_PATTERN)

Config = TypeVar("Config", bound=KeyOptions)


def load_api_keys(config: Config, origins: Origins, files: TextFiles) -> Config:
    """``config`` with the keys of --api-key-file added to those of --api-key, without duplicates; and those
    of administrators in the same way. ``files``: the same object each time that they are read.

    Raises ConfigError, whose message has a line for each problem and shows no key: for a file that cannot be
    read or has no key, for a key that no client could send, and for one of clients and administrators alike.
    """
    problems = Problems()
    clients, admins = dict[str, str](), dict[str, str]()
    with problems.collected():
        clients = _load("--api-key", config.api_key, config.api_key_file, origins, files)
    with problems.collected():
        admins = _load("--admin-api-key", config.admin_api_key, config.admin_api_key_file, origins, files)
    files.started = True
    problems.found += [
        f"{origin} is a key of clients as well, which would all be administrators"
        for origin, key in admins.items()
        if key in clients.values()
    ]
    problems.raise_all()
    return replace(
        config,
        api_key=list(dict.fromkeys(clients.values())) or None,
        admin_api_key=list(dict.fromkeys(admins.values())) or None,
    )


def reload_api_keys(given: Config, before: Config, files: TextFiles) -> Config | None:
    """``before`` with the keys of the files as they are now; ``given`` has those of the options themselves.
    What has changed is logged, in numbers. None: the files are bad, which is logged."""
    try:
        loaded = load_api_keys(given, {}, files)
    except ConfigError as error:
        log.error("SIGHUP: %s; the keys stay as they are, and nothing is restarted", error)
        return None
    for option in ("api_key", "admin_api_key"):
        if getattr(given, f"{option}_file") is not None:
            old, new = (set(getattr(config, option) or ()) for config in (before, loaded))
            flag, numbers = f"--{option.replace('_', '-')}-file", (len(new), len(new - old), len(old - new))
            log.info("SIGHUP: %s: %d keys are in effect, %d added, %d removed", flag, *numbers)
    return replace(before, api_key=loaded.api_key, admin_api_key=loaded.admin_api_key)


def _load(
    option: str, given: list[str] | None, path: str | None, origins: Origins, files: TextFiles
) -> dict[str, str]:
    """Keys by where they were given. Raises ConfigError."""
    keys = {f"{option}: key {number}": key for number, key in enumerate(given or (), 1)}
    field = option.removeprefix("--").replace("-", "_")
    if field in origins and origins[field].source == "command line":
        log.warning(
            "%s: a command line can be read by every user of this machine while the server starts, and stays "
            "in the shell's history; %s-file and PENSTOCK_%s do not",
            option,
            option,
            field.upper(),
        )
    if path is not None:
        keys |= _read(f"{option}-file", path, files)
    problems = Problems()
    problems.found += [
        f"{origin} has characters other than visible ASCII, no client could send it"
        for origin, key in keys.items()
        if not _KEY.fullmatch(key)
    ]
    problems.raise_all()
    return keys


def _read(option: str, path: str, files: TextFiles) -> dict[str, str]:
    """Origin of each key, such as its line → key. Empty lines and comments (#) are skipped."""
    try:
        lines = [line.strip() for line in files.read_file(path, ends=("\n",)).split("\n")]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {error}") from error
    warn_if_open_to_others(option, path)
    keys = {
        f"{option} {path}: line {number}": line
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    }
    if not keys:
        raise ConfigError(f"{option} {path}: there is no key in it; allowed: one per line")
    return keys
