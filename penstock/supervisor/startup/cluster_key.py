"""The key file that all hosts of a cluster share: ``--cluster-key-file``."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.config.secret_files import warn_if_open_to_others
from penstock.wire.curve import ClusterKey

KEY_FILE_PREFIX = "penstock-cluster-key-1 "
"""Precedes the secret key in the only line of a key file."""


def write_cluster_key(path: Path) -> None:
    """Make a key file that only its owner can read. Raises FileExistsError, OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(f"{KEY_FILE_PREFIX}{ClusterKey.generate().secret}\n")


def read_cluster_key(path: str) -> str:
    """The secret key of a file. Raises ConfigError, whose message does not show the key."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read(256).strip()
        if not text.startswith(KEY_FILE_PREFIX):
            raise ValueError("is no key file; penstock keys cluster FILE makes one")
        secret = ClusterKey(text.removeprefix(KEY_FILE_PREFIX)).secret
    except (OSError, ValueError) as error:
        raise ConfigError(f"--cluster-key-file {path}: {error}") from None
    warn_if_open_to_others("--cluster-key-file", path)
    return secret
