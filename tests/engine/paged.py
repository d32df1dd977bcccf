"""A model that is nothing but its KV cache, and a driver that takes a scheduler through its steps.

What lies in the cache for a token is a hash of the salt, the adapter, and all tokens and features of pictures
up to it. A step writes
the hashes of its tokens and reads those of the whole history, so whatever a stream is given that another one
computed must be exactly what it would have computed itself. The next token is a function of the last hash.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.batch.slots import SlotTable
from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.schedule.prefix_cache import NOBODY
from penstock.engine.schedule.scheduler import Scheduler
from penstock.media.pages import Pages
from penstock.wire.media.items import MediaItem
from penstock.wire.messages import Adapter, Submit
from tests.engine.support import Clock, Received, submit

VOCAB = 50
STEP_S, TOKEN_S = 0.01, 0.001
_PRIME = (1 << 61) - 1


def make_scheduler(
    slots: int = 4,
    blocks: int = 40,
    *,
    block_size: int = 4,
    model_len: int = 64,
    clock: Callable[[], float] = lambda: 0.0,
    block_log: BlockLog | None = None,
    adapters: AdapterTable | None = None,
    **options: Any,
) -> Scheduler:
    """By default no step takes any time."""
    table = SlotTable(slots, model_len, [])
    tables = BlockTables(slots, blocks, block_size, model_len)
    return Scheduler(
        table,
        SamplingMetadata(table, VOCAB),
        tables,
        ServeConfig(enable_lora=adapters is not None, **options),
        clock,
        block_log=block_log,
        adapters=adapters,
    )


class AnyAdapter:
    """Loads adapters that have no weights."""

    def read_weights(self, adapter: Adapter) -> None:
        """Nothing is read."""

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        """There is always room."""

    def remove(self, loaded: LoadedAdapter) -> None:
        """There is nothing to give back."""


def adapter_table(*names: str, digest: str = "1") -> AdapterTable:
    """A table in which these adapters are current."""
    table = AdapterTable(AnyAdapter(), 100)
    replace_adapters(table, *names, digest=digest)
    return table


def replace_adapters(table: AdapterTable, *names: str, digest: str) -> None:
    """Make these adapters current, and no others."""
    adapters = [Adapter(name, f"/{name}", digest=digest) for name in names]
    for adapter in adapters:
        table.add_adapter(adapter, None)
    table.make_current(adapters)


IMAGE = VOCAB - 1
"""The image token."""


def features_of(prompt: Sequence[int], media: Sequence[MediaItem]) -> dict[int, int]:
    """By position, what the tokens of a prompt get of its pictures."""
    found = {}
    for item in media:
        span = range(item.offset, item.offset + item.length)
        at = [position for position in span if prompt[position] == IMAGE]
        found.update({position: feature(item.key, index) for index, position in enumerate(at)})
    return found


def feature(key: bytes, index: int) -> int:
    """What stands for a feature of a picture."""
    return 1 + zlib.crc32(key) + (index << 32)


class Encoder:
    """Makes the features of pictures whose pages say how many there are."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def encode(self, item: MediaItem, pages: Pages) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64[features]"""
        self.encoded.append(item.key)
        return np.array([feature(item.key, index) for index in range(pages.facts.features)])


class Driver:
    """One scheduler, its cache, and what its API server has received. With ``clock``, the scheduler's, a step
    takes STEP_S and TOKEN_S for every token."""

    def __init__(self, scheduler: Scheduler, clock: Clock | None = None) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self.received = Received()
        self.prefilled = 0
        """Tokens computed, but for decodes."""
        self._hinted = False
        """Whether a client has wanted its blocks kept."""
        self.cached: dict[int, int] = {}
        """By stream, as its first row had it."""
        blocks = scheduler.blocks
        self._content = np.zeros((blocks.blocks + 1) * blocks.block_size, np.uint64)
        self._hashes: dict[int, list[int]] = {}
        """By stream: the hashes of its history, behind one of its salt and adapter."""
        self._features: dict[int, dict[int, int]] = {}
        """By stream with pictures: hashes of features, by position."""

    # -- requests

    def submit(
        self,
        stream: int,
        prompt: Sequence[int],
        output: int,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        media: tuple[MediaItem, ...] = (),
        server: int = 0,
        **more: Any,
    ) -> Submit:
        request = submit(stream, output, prompt=prompt, salt=salt, **more)
        request = msgspec.structs.replace(request, adapter=adapter, media=media)
        self._features[stream] = features_of(prompt, media)
        self._hinted = self._hinted or request.hints is not None
        table = self.scheduler.adapters
        key = None if adapter is None or table is None else table.of_request(request).key
        self._hashes[stream] = [hash((salt, key)) % _PRIME]
        self.scheduler.submit(server, request)
        return request

    # -- steps

    def step(self) -> Batch:
        scheduler = self.scheduler
        self.received.step(scheduler.take_aborted())
        batch = scheduler.schedule()
        scheduler.mark_launched(batch)
        assert batch.count.sum() <= scheduler.max_batched_tokens
        self._take_features(batch)
        tokens = self._run(batch)
        if self._clock is not None:
            self._clock.now += STEP_S + TOKEN_S * int(batch.count.sum())
        rows = scheduler.update_from_output(batch, tokens, None)
        self.received.step(rows)
        if rows.cached is not None:
            for row in np.flatnonzero(rows.cached).tolist():
                self.cached[int(rows.stream[row])] = int(rows.cached[row])
        self.check()
        return batch

    def finish(self, most_steps: int = 100_000, each: Callable[[Batch], None] = lambda batch: None) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work():
                return
            each(self.step())
        raise AssertionError(f"work is left after {most_steps} steps")

    def _run(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.int32]]:
        table, blocks = self.scheduler.table, self.scheduler.blocks
        parts = list(zip(batch.slots.tolist(), batch.start.tolist(), batch.count.tolist(), strict=True))
        self.prefilled += sum(count for _, _, count in parts if count > 1)
        expected = []
        for slot, start, count in parts:
            hashes = np.array(self._history(slot, start + count), np.uint64)
            rows = blocks.cache_rows(np.full(start + count, slot), np.arange(start + count))
            self._content[rows[start:]] = hashes[start:]
            written = blocks.table[slot, start // blocks.block_size : blocks.blocks_for(start + count)]
            assert np.isin(blocks.table, written).sum() == len(written), "a shared block is written"
            expected.append((rows, hashes))
        for rows, hashes in expected:
            assert (self._content[rows] == hashes).all(), "a stream reads what is not its history"
        last = [int(expected[part][1][-1]) for part in batch.samples.tolist()]
        for slot in batch.slots[batch.samples].tolist():
            assert batch.start[batch.slots == slot] < table.length[slot], "the last token is computed"
        return np.array([value % VOCAB for value in last], np.int32)

    def _take_features(self, batch: Batch) -> None:
        """Each image token of the batch gets the feature that is its own, and no other token gets any."""
        media, table = self.scheduler.streams.media, self.scheduler.table
        if media is None:
            return
        found = {}
        for rows, value in media.features(batch):
            found.update(zip(rows.rows.tolist(), value[rows.first : rows.last].tolist(), strict=True))
        flat, expected = 0, {}
        for slot, start, count in zip(
            *(x.tolist() for x in (batch.slots, batch.start, batch.count)), strict=True
        ):
            features = self._features[int(table.stream[slot])]
            expected.update(
                {flat + at - start: features[at] for at in range(start, start + count) if at in features}
            )
            flat += count
        assert found == expected

    def _history(self, slot: int, length: int) -> list[int]:
        table = self.scheduler.table
        hashes = self._hashes[int(table.stream[slot])]
        features = self._features.get(int(table.stream[slot]), {})
        for token in table.history[slot, len(hashes) - 1 : length].tolist():
            feature = features.get(len(hashes) - 1, 0)
            hashes.append((hashes[-1] * 1_000_003 + token + 1 + feature) % _PRIME)
        return hashes[1 : length + 1]

    # -- what always holds

    def check(self) -> None:
        blocks = self.scheduler.blocks
        named = np.zeros(blocks.blocks + 1, np.int32)
        for slot, owned in enumerate(blocks.block_counts.tolist()):
            row = blocks.table[slot, :owned]
            assert len(set(row.tolist())) == owned
            assert (blocks.table[slot, owned:] == NULL_BLOCK).all()
            named[row] += 1
        assert named[NULL_BLOCK] == 0
        used = int(np.count_nonzero(named))
        assert used + blocks.free_count() == blocks.blocks
        self._check_tree(named)

    def _check_tree(self, named: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Every run follows its parent, knows its holders, and is idle after those that follow it."""
        cache, blocks = self.scheduler.prefix_cache, self.scheduler.blocks
        runs = [child for root in cache._roots.values() for child in root.children.values()]
        assert all(root.children for root in cache._roots.values())
        held = Counter(run for entry in cache._held.values() for run in cache._to_root(entry.last))
        for run in runs:
            runs += run.children.values()
            assert run.parent is not None
            assert run.parent.children[cache._key(run)] is run
            assert run.start == run.parent.end
            assert run.blocks.base is None
            assert len(run.tokens) == 4 * blocks.block_size * len(run.blocks) > 0
            assert run.holders == held[run]
            assert (run.owner == NOBODY) == (run.computed == len(run.blocks))
            assert run.owner == NOBODY or not any(child.owner == NOBODY for child in run.children.values())
            assert bool(named[run.blocks].any()) == bool(named[run.blocks].all()) == bool(run.holders)
        of_runs = np.concatenate([run.blocks for run in runs]) if runs else np.zeros(0, np.int32)
        assert len(np.unique(of_runs)) == len(of_runs)
        idle = {run: place for place, run in enumerate(cache._idle)}
        assert idle.keys() == {run for run in runs if not run.holders}
        assert sum(len(run.blocks) for run in idle) == blocks.idle
        if not self._hinted:
            for run, place in idle.items():
                assert all(idle[child] < place for child in run.children.values())
        if idle:
            assert not cache._idle.next().children
        assert cache._idle.kept_blocks == sum(each.blocks for each in cache._idle._tenants.values())
        assert cache._idle.kept_blocks <= blocks.blocks // 2
