"""Updates the weights of all engines, by changes of the desired state.

Its value describes the weights completely: an update of some tensors adds its source to those before, so that
an engine that starts again gets them all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.dispatch.desired_states import EngineStates
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult
from penstock.dispatch.state_changes import StateChanges, fits
from penstock.wire.control import MAX_STATE_BYTES
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights.desired import MAX_SOURCES, DesiredWeights


class TooManySources(ValueError):
    """The update has no room beside those that it adds to."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What a request asks for."""

    weights: DesiredWeights
    """``sources``: the request's own."""
    whole: bool
    """Whether these are all; otherwise they are added to those before."""

    @property
    def asked(self) -> str:
        """In words, for the key."""
        sources = hashlib.sha256(msgspec.json.encode(self.weights.sources)).hexdigest()[:16]
        weights, how = self.weights, "whole" if self.whole else "in part"
        return (
            f"update_weights {how} version={weights.version} streams={weights.streams} "
            f"cache={weights.cache} sources={sources}"
        )


class WeightChanges:
    """The updates that one API server asks for."""

    def __init__(self, state_changes: StateChanges, states: EngineStates, *, lockstep: bool) -> None:
        """``lockstep``: the engines must all change between the same two steps."""
        self._state_changes = state_changes
        self._states = states
        self._lockstep = lockstep

    async def update(self, update: WeightUpdate, key: str, timeout_s: float) -> OperationResult:
        """Has all engines compute with other weights. If they do, or are about to, that is awaited. Raises
        TooManySources."""
        known = self._state_changes.find_change(WEIGHTS, key)
        if known is not None and not known.error:
            return await self._change(update, key, [], timeout_s)
        result = await self._join(update, timeout_s)
        if result is None:
            result = await self._change(update, key, self._stages(update), timeout_s)
            if result.outcome is OperationOutcome.CONFLICT:  # perhaps against the same update
                result = await self._join(update, timeout_s) or result
        return result

    async def _change(
        self, update: WeightUpdate, key: str, stages: list[dict[str, Any]], timeout_s: float
    ) -> OperationResult:
        initial: list[dict[str, Any]] = [{"hold": True}, {}] if self._lockstep else []
        return await self._state_changes.change(WEIGHTS, key, update.asked, stages, timeout_s, initial)

    async def _join(self, update: WeightUpdate, timeout_s: float) -> OperationResult | None:
        """The result if the desired version is the asked one: its receipts, or a conflict if it has other
        sources. None: it is another one."""
        desired, asked = self._desired(), update.weights
        if desired.version != asked.version:
            return None
        same = desired.sources if update.whole else desired.sources[-len(asked.sources) :]
        if same == asked.sources:
            return await self._state_changes.join(WEIGHTS, timeout_s)
        reason = f"weight_version {asked.version!r} is in use for other sources; give these another one"
        return OperationResult(OperationOutcome.CONFLICT, [], reason)

    def _desired(self) -> DesiredWeights:
        return msgspec.convert(self._states.find(WEIGHTS).value, DesiredWeights)

    def _stages(self, update: WeightUpdate) -> list[dict[str, Any]]:
        weights = update.weights
        if not update.whole:
            weights = msgspec.structs.replace(weights, sources=[*self._desired().sources, *weights.sources])
        if len(weights.sources) > MAX_SOURCES:
            raise TooManySources(
                f"the weights would have {len(weights.sources)} sources, at most {MAX_SOURCES} are read "
                "again by an engine that restarts: update the whole model from one"
            )
        value: dict[str, Any] = msgspec.to_builtins(weights)
        stages = [value | {"hold": True}, value] if self._lockstep else [value]
        if not fits(*stages):
            raise TooManySources(
                f"paths and names of tensors take more than {MAX_STATE_BYTES >> 10} KiB: update the whole "
                "model"
            )
        return stages
