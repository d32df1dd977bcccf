"""The streams that have a slot: their blocks, their progress, and how they leave or step back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import StepRows
from penstock.engine.batch.logprobs import LogprobsBuffer
from penstock.engine.batch.routed_experts import ExpertRoutes, RoutedExpertsBuffer
from penstock.engine.batch.slots import SlotTable
from penstock.engine.media.engine_media import EngineMedia
from penstock.engine.sampling.metadata import SamplingFeature, SamplingMetadata
from penstock.engine.schedule.adapter_room import AdapterRoom
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.device_memory_shortage import MemoryShortage
from penstock.engine.schedule.prefix_cache import PrefixCache
from penstock.engine.speculation.speculation import Speculation
from penstock.wire.arrays import I32
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import RoutedExperts

Slots = NDArray[np.intp]


class RunningStreams:
    """The streams with a slot, preempted ones included. State is arrays over slots."""

    def __init__(
        self,
        table: SlotTable,
        sampling: SamplingMetadata,
        blocks: BlockTables,
        prefix_cache: PrefixCache,
        shortage: MemoryShortage,
        adapter_room: AdapterRoom | None,
        speculation: Speculation | None,
    ) -> None:
        """``adapter_room``: None: no adapters run. ``speculation``: None: there are no drafts."""
        self.table = table
        self.sampling = sampling
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.shortage = shortage
        self.adapter_room = adapter_room
        self.speculation = speculation
        self.logprobs_buffer = LogprobsBuffer(table)
        self.routes: RoutedExpertsBuffer | None = None
        """None: the model has no experts."""
        self.media: EngineMedia | None = None
        """None: the engine takes no pictures."""
        self.computed = np.zeros(table.size, np.int32)
        """Tokens of each slot's history whose keys and values are in the KV cache after the last step."""
        self.priority = np.zeros(table.size, np.int64)
        """Priority of each slot's stream; lower ones are more important."""
        self.admitted = np.zeros(0, np.intp)
        """Slots in use: the most important priority first, then in order of admission."""
        self.has_freed_grammar = False
        """Whether a stream with a grammar has left since admission looked last."""
        self.steps = 0
        """Steps scheduled since the start."""
        self.preemptions = 0
        """Preemptions since the start."""

    def __len__(self) -> int:
        return len(self.admitted)

    def add(self, slot: int, priority: int) -> None:
        """Put a slot behind those of its priority."""
        self.priority[slot] = priority
        index = int(self.priority[self.admitted].searchsorted(priority, side="right"))
        before, after = self.admitted[:index], self.admitted[index:]
        self.admitted = np.concatenate((before, np.array([slot], np.intp), after))

    def ahead(self, slots: Slots) -> I32:
        """int32[n]: length of each history, including tokens that are still on the device only."""
        ahead: I32 = self.table.length[slots] + self.table.in_flight_tokens[slots]
        return ahead

    # -- leaving

    def free(self, slots: Slots) -> None:
        """End streams, and free their slots."""
        for slot in slots.tolist():
            self._clear(slot)
            self.table.release(slot)
        stays = np.ones(self.table.size, np.bool_)
        stays[slots] = False
        self.admitted = self.admitted[stays[self.admitted]]

    def fail(self, slots: Slots, code: str, message: str) -> StepRows:
        """End streams with an error, with rows of the tokens that were held back; free their slots."""
        wanting = self.sampling.logprobs >= 0
        for slot in slots.tolist():
            self._clear(slot)
        self.admitted = self.admitted[~np.isin(self.admitted, slots)]
        return self.table.fail(
            slots, code, message, lambda held: self.logprobs_buffer.take_held(held, wanting)
        )

    def take_held_logprobs(self, slots: Slots) -> Logprobs | None:
        """The logprobs of all tokens that streams hold back. Call it before their rows are made."""
        return self.logprobs_buffer.take_held(slots, self.sampling.logprobs >= 0)

    def flush(self) -> StepRows:
        """Rows of all tokens that were held back; the streams go on."""
        return self.table.flush(self.admitted, self.take_held_logprobs)

    def _clear(self, slot: int) -> None:
        self._release_blocks(slot, forever=True)
        self.has_freed_grammar |= bool(self.sampling.needs[slot] & SamplingFeature.GRAMMAR)
        if self.adapter_room is not None:
            self.adapter_room.end(slot)
        if self.speculation is not None:
            self.speculation.end(slot)
        self.shortage.forget(slot)
        self.sampling.clear(slot)
        if self.routes is not None:
            self.routes.clear(slot)
        if self.media is not None:
            self.media.release(slot)

    def keep_routes(self, routes: ExpertRoutes | None) -> None:
        """Keep the experts of tokens for streams that ask; None: the model has none."""
        self.routes = None if routes is None else RoutedExpertsBuffer(self.table, routes)

    def take_pictures(self, media: EngineMedia | None) -> None:
        """Run streams with pictures; None: there are none."""
        self.media = media
        self.prefix_cache.spans = None if media is None else media.spans

    def take_routes(self, slots: Slots) -> Sequence[tuple[int, RoutedExperts]]:
        """The experts of streams that end, for those that asked. Call it before they are freed."""
        return () if self.routes is None else self.routes.take(slots)

    # -- stepping back

    def preempt_last(self) -> int:
        """Preempt the least important stream, among equals the one admitted last. Returns its slot."""
        holders = self.admitted[self.blocks.block_counts[self.admitted] > 0]
        victim = int(holders[-1])
        self.preempt(victim)
        return victim

    def preempt(self, slot: int) -> None:
        """Free the blocks of a stream, which keeps its slot and its history."""
        self._release_blocks(slot, forever=False)
        self.computed[slot] = 0
        if self.media is not None:
            self.media.rewind(slot)
        self.preemptions += 1
        self.table.note_preemption(slot)

    def _release_blocks(self, slot: int, *, forever: bool) -> None:
        read = min(int(self.computed[slot]), int(self.table.length[slot]))
        self.prefix_cache.release(slot, read, forever=forever)
