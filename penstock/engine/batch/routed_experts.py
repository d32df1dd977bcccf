"""Which experts computed the tokens of streams that ask for it, held until the stream ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.sparse_zeros import sparse_zeros
from penstock.wire.messages import MAX_ROUTED_BYTES, RoutedExperts, Submit

MAX_BYTES = 1 << 30
"""Bytes that streams with a slot may hold together; others wait for theirs. An eighth of what the KV cache of
the same tokens takes, or less."""
Slots = NDArray[np.intp]


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertRoutes:
    """What a model has to say of each token: ``per_token`` experts in each of ``layers``."""

    layers: int
    """Layers that have experts, in the model's order."""
    per_token: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8) if self.experts <= 1 << 8 else np.dtype("<u2")


class RoutedExpertsBuffer:
    """Arrays [positions, layers, experts per token] by slot, of the slots whose streams ask.

    A position that is computed again (after preemption, or behind a rejected draft) is overwritten. Streams
    that ask read no cached prefix, so that every position is computed once at least.
    """

    def __init__(self, table: SlotTable, routes: ExpertRoutes) -> None:
        self._table = table
        self._routes = routes
        self._held: dict[int, NDArray[Any]] = {}
        self._known: dict[int, int] = {}
        """Positions that have been computed, from the first one on."""
        self._bytes = 0

    def check(self, request: Submit) -> None:
        """Raises RequestRejected for a stream that may need more than one may have."""
        size = self._bytes_of(request)
        if request.sampling.routed_experts and size > MAX_ROUTED_BYTES:
            raise RequestRejected(
                f"return_routed_experts: {size} bytes for prompt and max_tokens, at most {MAX_ROUTED_BYTES} "
                "are allowed; ask for fewer tokens"
            )

    def has_room(self, request: Submit) -> bool:
        """Whether the stream may begin."""
        return not request.sampling.routed_experts or self._bytes + self._bytes_of(request) <= MAX_BYTES

    def begin(self, slot: int, request: Submit) -> None:
        """A stream has got a slot."""
        if request.sampling.routed_experts:
            routes = self._routes
            shape = self._positions(request), routes.layers, routes.per_token
            self._held[slot] = sparse_zeros(shape, routes.dtype)
            self._known[slot] = 0
            self._bytes += self._held[slot].nbytes

    def write(
        self,
        slots: Slots,
        generations: NDArray[np.int64],
        positions: NDArray[np.int64],
        experts: NDArray[Any],
    ) -> None:
        """Keep the experts of T tokens at ``positions`` of their slots; those of a slot are next to each
        other, ascending. ``generations``: of the slots at the launch. ``experts``: [T, layers, K]."""
        starts = np.flatnonzero(np.concatenate(([True], slots[1:] != slots[:-1])))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(slots)], strict=True):
            slot, first = int(slots[start]), int(positions[start])
            held = self._held.get(slot)
            if held is None or generations[start] != self._table.generation[slot]:
                continue  # nobody asks, or the stream has left
            count = min(end - start, len(held) - first)  # drafts may go beyond
            held[first : first + count] = experts[start : start + count]
            self._known[slot] = max(self._known[slot], first + count)

    def take(self, slots: Slots) -> list[tuple[int, RoutedExperts]]:
        """What streams that end have: API server, and the message with the engine's number of the stream. The
        last token of a stream is sampled, but not computed."""
        if not self._held:
            return []
        table, routes, found = self._table, self._routes, []
        for slot in slots.tolist():
            held = self._held.get(slot)
            if held is not None:
                count = min(self._known[slot], int(table.length[slot]) - 1)
                message = RoutedExperts(
                    stream=int(table.stream[slot]),
                    layers=routes.layers,
                    per_token=routes.per_token,
                    width=routes.dtype.itemsize,
                    data=held[:count].tobytes(),
                )
                found.append((int(table.server[slot]), message))
        return found

    def clear(self, slot: int) -> None:
        held = self._held.pop(slot, None)
        if held is not None:
            self._bytes -= held.nbytes
            del self._known[slot]

    def _positions(self, request: Submit) -> int:
        base = len(request.prompt) // 4 - request.resumed
        return min(base + request.sampling.max_tokens, self._table.max_model_len) - 1

    def _bytes_of(self, request: Submit) -> int:
        routes = self._routes
        return self._positions(request) * routes.layers * routes.per_token * routes.dtype.itemsize
