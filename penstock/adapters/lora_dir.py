"""Paths that requests name: they must lie below ``--lora-dir``."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from penstock.adapters.errors import AdapterError
from penstock.wire.messages import MAX_PATH_CHARS

MAX_SHOWN_PATH = 200


def path_below(lora_dir: str, given: str) -> str:
    """The real path of the directory ``given``, which lies below ``lora_dir``.

    ``given`` is absolute or relative to ``lora_dir``. Raises AdapterError; of a path outside it does not tell
    whether it exists.
    """
    shown = repr(given[:MAX_SHOWN_PATH])
    if not given or len(given) > MAX_PATH_CHARS:
        raise AdapterError(f"path {shown}: it must have 1 to {MAX_PATH_CHARS} characters")
    if "\0" in given or not _is_utf8(given):
        raise AdapterError(f"path {shown}: it has a character that paths cannot have")
    path = PurePosixPath(given)
    if ".." in path.parts:
        raise AdapterError(f"path {shown}: it must not contain '..'")
    outside = AdapterError(f"path {shown}: it must lie below --lora-dir ({lora_dir})")
    try:
        root = os.path.realpath(lora_dir, strict=True)
    except OSError as error:
        raise AdapterError(f"--lora-dir {lora_dir}: {error.strerror}") from None
    if path.is_absolute():
        bases = [base for base in (os.path.abspath(lora_dir), root) if path.is_relative_to(base)]
        if not bases:
            raise outside
        path = path.relative_to(bases[0])
    try:
        real = os.path.realpath(os.path.join(root, path), strict=True)
    except OSError as error:
        raise AdapterError(f"path {shown}: {error.strerror}") from None
    if real == root or not PurePosixPath(real).is_relative_to(root):
        raise outside
    if not _is_utf8(real):
        raise AdapterError(f"path {shown}: it is a link to a directory whose name is not UTF-8")
    if not os.path.isdir(real):
        raise AdapterError(f"path {shown}: it is not a directory")
    return real


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
