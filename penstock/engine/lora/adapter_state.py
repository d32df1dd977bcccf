"""The list of LoRA adapters as a desired state of all engines.

To prepare a change is to read the new adapters' files, in a thread, and to load them; to commit it is to let
streams use the adapters of the new list and no others. Those of the list before stay in memory until the new
one holds. Whoever asks for a change has checked that the files suit the model; an engine checks them again,
as they may have changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import msgspec

from penstock.adapters.errors import AdapterError
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.wire.adapter_list import ADAPTERS, AdapterList, AdapterStatus
from penstock.wire.messages import Adapter, AdapterKey

log = logging.getLogger(__name__)

INTERNAL_ERROR = "it could not be loaded; the engine's log says more"


class AdapterState:
    """The desired list on one engine, for :class:`penstock.engine.loop.state_reconciler.StateReconciler`."""

    name = ADAPTERS
    default: Mapping[str, Any] = {"adapters": []}

    def __init__(self, table: AdapterTable, executor: Executor | None = None) -> None:
        """``executor`` reads the files; None: a thread, from the first change on."""
        self._table = table
        self._list: list[Adapter] = []
        self._next: list[Adapter] | None = None
        """The list that is being prepared."""
        self._reading: dict[AdapterKey, tuple[Adapter, Future[Any]]] = {}
        """Files that are being read, or have been read and not been loaded yet."""
        self._failed: dict[AdapterKey, str] = {}
        """Why adapters of the next list cannot be loaded."""
        self._missing: dict[AdapterKey, str] = {}
        """Why adapters of the present list could not be loaded."""
        self._executor = executor
        self._has_retired = False

    @property
    def is_reading(self) -> bool:
        """Whether files are being read."""
        return bool(self._reading)

    # -- at the start

    def load_at_start(self, adapters: Sequence[Adapter], *, tolerant: bool) -> None:
        """Load adapters before the engine serves. ``tolerant``: serve without those that cannot be loaded;
        otherwise raises AdapterError, which names the adapter."""
        for adapter in adapters:
            try:
                self._table.add_adapter(adapter, self._table.loader.read_weights(adapter))
            except Exception as error:  # noqa: BLE001 - the engine does without the adapter
                reason = _reason(adapter, error)
                if not tolerant:
                    raise AdapterError(f"adapter {adapter.name} ({adapter.path}): {reason}") from None
                self._note_failed(adapter, reason)
        self._missing, self._failed = self._failed, {}
        self._list = list(adapters)
        self._table.make_current(adapters)

    # -- a change

    def prepare(self, value: dict[str, Any]) -> None:
        """Begin to read what the list ``value``, an :class:`AdapterList`, has in addition. Raises
        ValueError."""
        wanted = msgspec.convert(value, AdapterList).adapters
        self._next = wanted
        self._failed.clear()
        try:
            self._begin_to_read(wanted)
        except BaseException:
            self.abort()
            raise

    def _begin_to_read(self, wanted: Sequence[Adapter]) -> None:
        for adapter in wanted:
            key = adapter.name, adapter.digest
            if key not in self._table and key not in self._reading:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, "adapters")
                self._reading[key] = adapter, self._executor.submit(self._table.loader.read_weights, adapter)

    def prepared(self, *, firm: bool) -> bool:
        """Whether all files are read, and what they hold is loaded. Raises AdapterError when an adapter
        cannot be loaded, unless ``firm``."""
        if not all(future.done() for _, future in self._reading.values()):
            return False
        while self._reading:
            _, (adapter, future) = self._reading.popitem()
            try:
                self._table.add_adapter(adapter, future.result())
            except Exception as error:  # noqa: BLE001 - the change is refused, or made without the adapter
                self._note_failed(adapter, _reason(adapter, error))
        if not firm:
            self._refuse_new()
            self._check_retired()
        return True

    def commit(self, generation: int = 0) -> None:
        """Let streams use the prepared list."""
        assert self._next is not None  # it was prepared
        self._list, self._next = self._next, None
        self._missing, self._failed = self._failed, {}
        self._table.make_current(self._list)
        self._has_retired = False

    def settle(self) -> None:
        """Let adapters go that only the list before had."""
        self._has_retired = True

    def abort(self) -> None:
        """Drop what was loaded for the change."""
        self._next = None
        for _, future in self._reading.values():
            future.cancel()
        self._reading.clear()
        self._failed.clear()
        self._has_retired = True

    def result(self) -> dict[str, Any]:
        """An :class:`AdapterStatus`."""
        missing = {name: reason for (name, _), reason in self._missing.items()}
        status: dict[str, Any] = msgspec.to_builtins(AdapterStatus(self._table.digests(), missing))
        return status

    # -- between steps

    def tidy(self) -> None:
        """Remove adapters that no stream uses any more. To be called between steps."""
        if self._has_retired and self._next is None:
            self._has_retired = self._table.remove_unused()

    def _refuse_new(self) -> None:
        """Raises AdapterError for an adapter that cannot be loaded and is new with this change. One that the
        engine lacked before does not keep others from being loaded."""
        known = {(adapter.name, adapter.digest) for adapter in self._list}
        for key, reason in self._failed.items():
            if key not in known:
                raise AdapterError(f"adapter {key[0]}: {reason}")

    def _check_retired(self) -> None:
        """Raises AdapterError if too many adapters stay in memory for their streams alone."""
        assert self._next is not None  # it is being prepared
        retired = self._table.in_use_beside({(adapter.name, adapter.digest) for adapter in self._next})
        if retired > self._table.max_loaded:
            raise AdapterError(
                f"{retired} adapters that were unloaded or replaced still have streams, at most "
                f"{self._table.max_loaded} may (--max-cpu-loras); try again when they have ended"
            )

    def _note_failed(self, adapter: Adapter, reason: str) -> None:
        if self._missing.get((adapter.name, adapter.digest)) != reason:  # each try finds the same
            log.error("adapter %s (%s) cannot be loaded: %s", adapter.name, adapter.path, reason)
        self._failed[adapter.name, adapter.digest] = reason


def _reason(adapter: Adapter, error: Exception) -> str:
    """Why an adapter cannot be loaded. Called while ``error`` is handled."""
    if isinstance(error, AdapterError):
        return str(error)
    log.exception("adapter %s", adapter.name)
    return INTERNAL_ERROR
