"""The secret that seals summaries, the same for all API servers of a host: ``--seal-key-file``."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.serve import ServeConfig
from penstock.generation.compaction.seal import MIN_KEY_BYTES

FILE = "seal.key"
"""Beside the stored responses."""
MAX_KEY_BYTES = 4096


def seal_key(config: ServeConfig, responses: str | None) -> bytes:
    """The secret of the option's file, or else of a file in ``responses``, the directory of stored responses,
    which is made if it is missing; without a directory one for this start. Raises ConfigError, OSError."""
    if config.seal_key_file is not None:
        return _given(config.seal_key_file)
    if responses is None:
        return secrets.token_bytes(MIN_KEY_BYTES)
    path = Path(responses) / FILE
    try:
        return _kept(path)
    except FileNotFoundError:
        made = path.with_name(f"{FILE}.{secrets.token_hex(8)}")
        made.touch(0o600)
        made.write_text(secrets.token_hex(MIN_KEY_BYTES))
        try:
            os.link(made, path)  # whole or not at all; another server's file stays
        except FileExistsError:
            pass
        finally:
            made.unlink()
        return _kept(path)


def _kept(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{path}: is no key of at least {MIN_KEY_BYTES} bytes; remove it")
    return key


def _given(file: str) -> bytes:
    try:
        with open(Path(file).expanduser(), "rb") as opened:
            key = opened.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"--seal-key-file {file}: {error.strerror or error}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"--seal-key-file {file}: must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    warn_if_open_to_others("--seal-key-file", file)
    return key
