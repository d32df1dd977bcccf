"""Loads and unloads LoRA adapters on all engines, by changes of the desired list.

Every change sets the whole list after it. Of two changes at the same time one loses and is made again on the
other one's list.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult, Receipt
from penstock.dispatch.state_changes import StateChanges, fits
from penstock.wire.adapter_list import ADAPTERS, AdapterList, AdapterStatus
from penstock.wire.control import MAX_STATE_BYTES
from penstock.wire.messages import Adapter, LoraInfo

MIN_PAUSE_S, MAX_PAUSE_S = 0.01, 0.2
"""Pause before a change that lost against another one is made again, drawn anew each time."""


class NameTaken(ValueError):
    """An adapter with other files has the name."""


class TooManyAdapters(ValueError):
    """The list has no room for another adapter."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks for."""

    asked: str
    """In words, for the key."""
    name: str
    adapter: Adapter | None = None
    """The adapter that ``name`` stands for afterwards; None: none."""
    replace: bool = False


class AdapterChanges:
    """The changes that one API server asks for."""

    def __init__(self, engine_client: EngineClient, state_changes: StateChanges) -> None:
        self._engine_client = engine_client
        self._registry: AdapterRegistry = engine_client.adapters
        self._state_changes = state_changes

    def limits(self) -> LoraInfo | None:
        """What the connected engines can load; None: they run no adapters, or none is connected."""
        found = [engine.info.lora for engine in self._engine_client.engines if engine.up and engine.info]
        known = [lora for lora in found if lora is not None]
        if not known or len(known) < len(found):
            return None
        return min(known, key=lambda lora: (lora.max_cpu_loras, lora.max_lora_rank))

    def knows(self, key: str) -> bool:
        """Whether a change with this idempotency key has been made, or is being made."""
        known = self._state_changes.find_change(ADAPTERS, key)
        return known is not None and not known.error

    async def load(self, adapter: Adapter, key: str, timeout_s: float, *, replace: bool) -> OperationResult:
        """Has all engines load an adapter; with ``replace`` in place of the one with its name. Raises
        NameTaken and TooManyAdapters."""
        asked = f"load {adapter.name} {adapter.digest}"
        return await self._make(_Wanted(asked, adapter.name, adapter, replace), key, timeout_s)

    async def unload(self, name: str, key: str, timeout_s: float) -> OperationResult:
        """Has all engines take no new streams of an adapter; those that run with it finish."""
        return await self._make(_Wanted(f"unload {name}", name), key, timeout_s)

    async def _make(self, wanted: _Wanted, key: str, timeout_s: float) -> OperationResult:
        """Make a change until it does not lose against another one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            done = await self._make_once(wanted, key, deadline - loop.time())
            pause = random.uniform(MIN_PAUSE_S, MAX_PAUSE_S)
            lost = done.outcome is OperationOutcome.CONFLICT and not done.reason
            if not lost or loop.time() + pause >= deadline:
                return _about(done, wanted.name)
            await asyncio.sleep(pause)

    async def _make_once(self, wanted: _Wanted, key: str, timeout_s: float) -> OperationResult:
        known = self.knows(key)
        if not known and self._holds(wanted):
            joined = await self._state_changes.join(ADAPTERS, timeout_s)
            if joined is not None:
                return joined
        stages = [] if known else [self._value(wanted)]
        return await self._state_changes.change(ADAPTERS, key, wanted.asked, stages, timeout_s)

    def _holds(self, wanted: _Wanted) -> bool:
        """Whether the list is as wanted, and no engine lacks the adapter. Raises NameTaken."""
        present, adapter = self._registry.adapters.get(wanted.name), wanted.adapter
        if present is None or adapter is None:
            return present is adapter
        if present.digest != adapter.digest and not wanted.replace:
            raise NameTaken(f"{wanted.name!r} is loaded from {present.path}, with other files")
        if (present.key, present.path) != (adapter.key, adapter.path):
            return False
        return not any(wanted.name in engine.missing_adapters for engine in self._engine_client.engines)

    def _value(self, wanted: _Wanted) -> dict[str, Any]:
        """The list after the change. Raises TooManyAdapters."""
        adapters = dict(self._registry.adapters)
        if wanted.adapter is None:
            adapters.pop(wanted.name, None)
        else:
            adapters[wanted.name] = wanted.adapter
        limits = self.limits()
        if wanted.adapter is not None and limits is not None and len(adapters) > limits.max_cpu_loras:
            raise TooManyAdapters(
                f"{len(adapters) - 1} adapters are loaded, at most {limits.max_cpu_loras} may be "
                "(--max-cpu-loras); unload one first"
            )
        value: dict[str, Any] = msgspec.to_builtins(AdapterList(list(adapters.values())))
        if not fits(value):
            raise TooManyAdapters(
                f"names and paths of {len(adapters)} adapters take more than {MAX_STATE_BYTES >> 10} KiB; "
                "unload one first, or use shorter paths"
            )
        return value


def _about(change: OperationResult, name: str) -> OperationResult:
    """The change, with receipts about one adapter."""
    receipts = [_receipt_of(receipt, name) for receipt in change.receipts]
    failed = any(receipt.error is not None for receipt in receipts)
    outcome = (
        OperationOutcome.PARTIAL if change.outcome is OperationOutcome.DONE and failed else change.outcome
    )
    return OperationResult(outcome, receipts, change.reason)


def _receipt_of(receipt: Receipt, name: str) -> Receipt:
    """An engine's receipt, about one adapter: its result says whether it is loaded; an error, why not."""
    if receipt.error is not None:
        return receipt
    status = msgspec.convert(receipt.result, AdapterStatus)
    digest = status.loaded.get(name)
    if name in status.missing:
        error = f"adapter {name}: {status.missing[name]}"
        return msgspec.structs.replace(receipt, step=None, result=None, error=error, code="not_loaded")
    return msgspec.structs.replace(receipt, result={"loaded": digest is not None, "digest": digest})
