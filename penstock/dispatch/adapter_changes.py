"""Loads and unloads LoRA adapters on all engines, by changes of the agreed list.

Every change proposes the whole list after it. Of two changes at the same time one loses and is made again on
the other one's list. The list remembers the latest idempotency keys, so that a request which is sent again,
also to another API server, is not carried out twice.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass

import msgspec

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Receipt
from penstock.dispatch.two_phase_change import Outcome
from penstock.dispatch.two_phase_commit import TwoPhaseCommit
from penstock.wire.adapter_list import ADAPTERS, AdapterList, AdapterStatus
from penstock.wire.control import MAX_STATE_BYTES
from penstock.wire.messages import Adapter, LoraInfo

MAX_KEYS = 64
"""Idempotency keys that the list remembers."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.01, 0.2
"""Pause before a change that lost against another one is made again, drawn anew each time."""
ENVELOPE_BYTES = 1024
"""Of a proposal beside the list."""


class KeyReused(ValueError):
    """An idempotency key was used for something else."""


class NameTaken(ValueError):
    """An adapter with other files has the name."""


class TooManyAdapters(ValueError):
    """The list has no room for another adapter."""


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """How a request ended."""

    outcome: Outcome
    receipts: list[Receipt]


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
    """The changes that one API server coordinates, one at a time."""

    def __init__(self, engine_client: EngineClient, two_phase_commit: TwoPhaseCommit) -> None:
        self._engine_client = engine_client
        self._registry: AdapterRegistry = engine_client.adapters
        self._two_phase_commit = two_phase_commit
        self._turn = asyncio.Lock()

    def limits(self) -> LoraInfo | None:
        """What the connected engines can load; None: they run no adapters, or none is connected."""
        found = [engine.info.lora for engine in self._engine_client.engines if engine.up and engine.info]
        known = [lora for lora in found if lora is not None]
        if not known or len(known) < len(found):
            return None
        return min(known, key=lambda lora: (lora.max_cpu_loras, lora.max_lora_rank))

    async def load(self, adapter: Adapter, key: str, timeout_s: float, *, replace: bool) -> AdapterChange:
        """Has all engines load an adapter; with ``replace`` in place of the one with its name. Raises
        NameTaken, TooManyAdapters and KeyReused."""
        asked = f"load {adapter.name} {adapter.digest}"
        return await self._make(_Wanted(asked, adapter.name, adapter, replace), key, timeout_s)

    async def unload(self, name: str, key: str, timeout_s: float) -> AdapterChange:
        """Has all engines take no new streams of an adapter; those that run with it finish. Raises
        KeyReused."""
        return await self._make(_Wanted(f"unload {name}", name), key, timeout_s)

    async def _make(self, wanted: _Wanted, key: str, timeout_s: float) -> AdapterChange:
        """Makes a change until it does not lose against another one."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            return AdapterChange(Outcome.CONFLICT, [])
        try:
            while True:
                left = max(deadline - asyncio.get_running_loop().time(), 0.0)
                done = await self._make_once(wanted, key, left)
                if done.outcome is not Outcome.CONFLICT:
                    return done
                pause = random.uniform(MIN_PAUSE_S, MAX_PAUSE_S)
                if asyncio.get_running_loop().time() + pause >= deadline:
                    return done
                await asyncio.sleep(pause)
        finally:
            self._turn.release()

    async def _make_once(self, wanted: _Wanted, key: str, timeout_s: float) -> AdapterChange:
        def check(receipt: Receipt) -> Receipt:
            return _receipt_of(receipt, wanted.name)

        registry = self._registry
        earlier = registry.keys.get(key)
        if earlier not in (None, wanted.asked):
            raise KeyReused(f"the idempotency key {key!r} was used for: {earlier}")
        if earlier is not None or self._holds(wanted):
            if not registry.version:
                return AdapterChange(Outcome.DONE, self._unchanged())
            change = await self._two_phase_commit.repeat(ADAPTERS, timeout_s, check)
        else:
            arguments = self._arguments(wanted, key)
            # a key of its own: with the client's, an attempt could meet what an earlier one has prepared
            attempt = secrets.token_hex(16)
            change = await self._two_phase_commit.change(ADAPTERS, arguments, attempt, timeout_s, check)
        assert change.outcome is not None  # it has ended
        return AdapterChange(change.outcome, change.receipts())

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

    def _unchanged(self) -> list[Receipt]:
        """Receipts of engines that have never been asked for a change."""
        engines = self._engine_client.engines
        return [Receipt(rank, engines[rank].epoch, repeated=True) for rank in self._engine_client.members()]

    def _arguments(self, wanted: _Wanted, key: str) -> dict[str, object]:
        """The list after the change. Raises TooManyAdapters."""
        adapters = dict(self._registry.adapters)
        if wanted.adapter is None:
            adapters.pop(wanted.name, None)
        else:
            adapters[wanted.name] = wanted.adapter
        keys = [*self._registry.keys.items(), (key, wanted.asked)][-MAX_KEYS:]
        limits = self.limits()
        if wanted.adapter is not None and limits is not None and len(adapters) > limits.max_cpu_loras:
            raise TooManyAdapters(
                f"{len(adapters) - 1} adapters are loaded, at most {limits.max_cpu_loras} may be "
                "(--max-cpu-loras); unload one first"
            )
        arguments: dict[str, object] = msgspec.to_builtins(AdapterList(list(adapters.values()), keys))
        if len(msgspec.json.encode(arguments)) > MAX_STATE_BYTES - ENVELOPE_BYTES:
            raise TooManyAdapters(
                f"names and paths of {len(adapters)} adapters take more than {MAX_STATE_BYTES >> 10} KiB; "
                "unload one first, or use shorter paths"
            )
        return arguments


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
