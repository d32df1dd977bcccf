"""What a process that attaches an engine leaves to its successor, in the run directory.

An engine keeps the addresses of its handshake, and describes itself once, when it starts. So the process that
takes it over needs both from its predecessor.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

PREFIX = "attached-"
"""Prefix of the files' names; the handshake's port and the engine's rank follow."""


def data_ports(port: int, rank: int) -> tuple[int, int]:
    """The ports of engine ``rank`` for requests and outputs, behind the handshake's ``port``."""
    return port + 1 + 2 * rank, port + 2 + 2 * rank


class Attachment(msgspec.Struct, frozen=True):
    ports: tuple[int, int]
    """Where the engine connects, for requests and outputs."""
    ready: bytes | None = None
    """The engine's ReadyResponse; None: no engine has been attached."""


class AttachmentFile:
    """The file of one engine."""

    def __init__(self, run_dir: str, port: int, rank: int) -> None:
        """``port``: of the handshake, as it was given: a start with another one changes nothing of this one's
        file."""
        self._path = Path(run_dir) / f"{PREFIX}{port}-{rank}"

    def load(self) -> Attachment | None:
        """None: there is none, or it cannot be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Attachment)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            log.warning("%s: cannot be read: %s; it is ignored", self._path, error)
            return None

    def save(self, attachment: Attachment) -> None:
        """Replace the file. Raises OSError."""
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{PREFIX}")
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(attachment))
        os.replace(name, self._path)
