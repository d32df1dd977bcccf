"""Pictures of --allowed-local-media-path, by file: URLs."""

from __future__ import annotations

import os
import stat
from urllib.parse import unquote_to_bytes, urlsplit

from penstock.media.refused import Refused

_ON_THE_WAY = getattr(os, "O_PATH", getattr(os, "O_SEARCH", os.O_RDONLY)) | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def read_local(url: str, directory: str, max_bytes: int) -> bytes:
    """The bytes of the regular file that ``url`` names, if it is in ``directory`` after all symbolic links.
    Raises Refused, which does not tell whether there is a file outside of it."""
    path = _path(url)
    root = os.path.realpath(os.fsencode(directory))
    real = os.path.realpath(path)
    if not real.startswith(root.rstrip(b"/") + b"/"):
        raise Refused("forbidden", "the file is not in the directory of --allowed-local-media-path")
    try:
        fd = _open_below(root, real[len(root) :].strip(b"/").split(b"/"))
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise Refused("forbidden", "the file is not a regular file")
            with open(fd, "rb", closefd=False) as file:
                data = b"" if facts.st_size > max_bytes else file.read(max_bytes + 1)
        finally:
            os.close(fd)
    except OSError:
        raise Refused("invalid", "the server has no such file that it can read") from None
    if facts.st_size > max_bytes or len(data) > max_bytes:
        raise Refused("too_large", f"the file has more than {max_bytes:,} bytes")
    return data


def _path(url: str) -> bytes:
    """Raises Refused."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise Refused("invalid", "the file: URL cannot be read") from None
    path = unquote_to_bytes(parts.path)
    if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        raise Refused("invalid", "a file: URL has no host, query or fragment: file:///DIRECTORY/NAME")
    if not path.startswith(b"/") or b"\0" in path:
        raise Refused("invalid", "a file: URL has an absolute path: file:///DIRECTORY/NAME")
    return path


def _open_below(root: bytes, parts: list[bytes]) -> int:
    """Open part by part: one that has become a symbolic link since the path was resolved is an OSError."""
    fd = os.open(root, _ON_THE_WAY)
    for part in parts:
        flags = _FILE if part is parts[-1] else _ON_THE_WAY | os.O_NOFOLLOW
        try:
            child = os.open(part, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = child
    return fd
