"""``--budget-state-file``: the budgets that the keeper has, for the gateway that starts next.

The file is replaced as a whole, in a thread of its own, every few seconds while budgets change, and when the
gateway ends. So what a gateway that is killed loses is what was used in the last seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config.errors import ConfigError
from penstock.gateway.admission.budget_store import MemoryBudgetStore, SavedBudgets
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_failure = RateLimitedLog(log, logging.ERROR)

INTERVAL_S = 2.0
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(SavedBudgets)


def read_budget_state(path: str) -> SavedBudgets:
    """What a gateway before this one has saved; nothing, if there is no file. Raises ConfigError."""
    try:
        return _decoder.decode(Path(path).read_bytes())
    except FileNotFoundError:
        if os.access(Path(path).absolute().parent, os.W_OK | os.X_OK):
            return SavedBudgets([], [])
        reason = "its folder cannot be written"
    except OSError as error:
        reason = error.strerror or str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = f"it was not written by a gateway: {error}; delete it to begin with full budgets"
    raise ConfigError(f"--budget-state-file {path}: {reason}")


class BudgetState:
    """Saves the budgets of ``store``. ``wall`` gives Unix times."""

    def __init__(self, path: str, store: MemoryBudgetStore, wall: Callable[[], float] = time.time) -> None:
        """Restore them. Raises ConfigError."""
        self._path = path
        self._store = store
        self._wall = wall
        store.restore(read_budget_state(path), wall())
        self._changes = store.changes
        """Changes that are saved."""

    async def run(self) -> None:
        """Save what changes, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._store.changes != self._changes:
                changes, saved = self._store.changes, self._store.saved(self._wall())
                if await loop.run_in_executor(None, self._write, saved):
                    self._changes = changes

    def save(self) -> None:
        """Save them now."""
        if self._store.changes != self._changes:
            self._write(self._store.saved(self._wall()))

    def _write(self, saved: SavedBudgets) -> bool:
        """Return whether it is written; it is tried again later."""
        name = ""
        try:
            file, name = tempfile.mkstemp(dir=Path(self._path).absolute().parent, prefix=".budgets-")
            with open(file, "wb") as opened:
                opened.write(_encode(saved))
                opened.flush()
                os.fsync(file)
            os.replace(name, self._path)
            return True
        except OSError as error:
            _log_failure("write", "--budget-state-file %s cannot be written: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                os.unlink(name)
            return False
