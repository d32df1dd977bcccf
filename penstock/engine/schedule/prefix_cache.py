"""Prefix caching: streams with a common prefix share the KV blocks of its full blocks.

The cached histories are a tree. A node holds a run of full blocks with their tokens, its children are what
followed; histories that part within a run split it. Lookups compare tokens, a run at a time, so a turn of a
long conversation costs what its runs are, not its blocks. Those of its turns are merged when it is idle. A
tree belongs to one scope: streams of different adapters, or with different cache salts, share nothing. Only
full blocks are shared, and never the block with the last token of a history: that token is computed for its
logits, so shared blocks are never written. Pictures are compared by their numbers
(:mod:`penstock.engine.media.picture_numbers`): "tokens" below are those with these in their places.

Runs that a stream is about to compute are *promised*: other streams wait for them instead of computing them
as well. A promise is fulfilled block by block, or withdrawn when the stream frees its blocks: either way it
is *resolved*. A stream that promises blocks has them all allocated, so nobody waits forever.

A run that no stream holds is *idle*, and so are all that follow it. Idle blocks count as free: they are
evicted when others are wanted, those that clients want kept last (:mod:`.idle_runs`), from a run's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.batch.slots import SlotTable
from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.media.picture_numbers import PictureNumbers, picture_keys
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.schedule.cache_scope import UNSCOPED, CacheScope
from penstock.engine.schedule.idle_runs import IdleRuns, lifetime
from penstock.wire.arrays import I32
from penstock.wire.messages import AdapterKey, SamplingParams, Submit

if TYPE_CHECKING:
    from penstock.engine.lora.adapter_table import LoadedAdapter
    from penstock.engine.media.spans import MediaSpans

NOBODY = -1


@dataclass(slots=True, eq=False)
class CachedRun:
    """A node of the tree: consecutive full blocks of a history, and what came before them."""

    tokens: bytes
    """int32 token ids, of all blocks."""
    blocks: I32
    """int32[blocks], an array of its own: a view would keep that of a whole history."""
    start: int
    """Blocks before the run."""
    parent: CachedRun | None
    """None: the root, which has no blocks."""
    children: dict[bytes, CachedRun] = field(default_factory=dict)
    """Runs that follow, by the tokens of their first block."""
    holders: int = 0
    """Streams whose history has the run."""
    owner: int = NOBODY
    """The slot that has promised the run and computes it."""
    computed: int = 0
    """Leading blocks that are computed."""
    scope: CacheScope = UNSCOPED
    keep_s: int = 0
    """Seconds for which clients want it after its last use."""

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


@dataclass(slots=True)
class Prefix:
    """The full blocks of a history, except one that ends with the history's last token: a chunk may end
    before that token, and a promise stay open."""

    scope: CacheScope
    tokens: bytes
    blocks: int
    reads_cache: bool = True
    """Whether the stream uses cached blocks, and promises those that it computes."""
    awaited: CachedRun | None = None
    """After a lookup that found the next block promised: the last run that is promised with it."""
    keep_s: int = 0
    """Seconds for which the client wants it after the stream."""


@dataclass(slots=True)
class CachedPrefix:
    """The cached beginning of a history."""

    runs: list[CachedRun] = field(default_factory=list)
    blocks: int = 0
    idle: int = 0
    """Blocks among them that no stream holds."""


@dataclass(slots=True)
class _Held:
    """What the tree has of a running stream's history."""

    prefix: Prefix
    last: CachedRun | None
    """The last run; None: there is none."""
    resets: int
    """Resets of the cache before the stream began."""


def _reads_cache(sampling: SamplingParams) -> bool:
    return sampling.prompt_logprobs < 0 and not sampling.routed_experts


class PrefixCache:
    """Looks up, promises and caches the blocks of each slot's stream."""

    def __init__(
        self, table: SlotTable, blocks: BlockTables, *, enabled: bool, log: BlockLog | None = None
    ) -> None:
        """``log`` records what is cached and evicted; None: nobody reads it."""
        self.enabled = enabled
        self.queries = 0
        """Prompt tokens of admitted streams that were looked up."""
        self.hits = 0
        """Tokens of looked-up prompts that were found cached."""
        self._table = table
        self._blocks = blocks
        self._log = log
        self.spans: MediaSpans | None = None
        """Pictures of the slots' streams; None: the engine takes none."""
        self._numbers = PictureNumbers()
        self._block_bytes = 4 * blocks.block_size
        self._roots: dict[CacheScope, CachedRun] = {}
        """Roots of the trees by scope; scopes without cached runs have none."""
        self._held: dict[int, _Held] = {}
        """What streams hold, by slot."""
        self._preempted: dict[int, Prefix] = {}
        """Histories of preempted streams, by slot."""
        self._idle = IdleRuns(blocks.blocks)
        self._awaited: set[CachedRun] = set()
        """Promised runs that lookups have named."""
        self._resolved: list[CachedRun] = []
        self._resets = 0
        blocks.evict = self._evict

    # -- lookups

    def prefix_of(self, request: Submit, adapter: LoadedAdapter | None = None) -> Prefix | None:
        """The prefix of a prompt; None when prefix caching is off, or knows no number for a picture.
        ``adapter``: the request's.

        A request for prompt logprobs or routed experts does not read the cache: all its prompt tokens have to
        be computed.
        """
        if not self.enabled:
            return None
        scope = CacheScope(request.cache_salt, None if adapter is None else adapter.key)
        keep_s = 0 if request.hints is None else lifetime(request.hints.keep_s)
        tokens: bytes | None = request.prompt
        if request.media:
            tokens = self._numbers.in_place(request.prompt, request.media)
        return None if tokens is None else self._prefix(scope, tokens, _reads_cache(request.sampling), keep_s)

    def _prefix(self, scope: CacheScope, history: bytes, reads_cache: bool, keep_s: int) -> Prefix:
        blocks = (len(history) - 4) // self._block_bytes
        return Prefix(scope, history, blocks, reads_cache, keep_s=keep_s)

    def prefix_of_preempted(self, slot: int) -> Prefix | None:
        """The prefix of a preempted stream; None when the cache was reset after it began."""
        return self._preempted.get(slot)

    def find_prefix(self, prefix: Prefix | None) -> CachedPrefix | None:
        """The cached beginning of a history; None when another stream is computing its next block, and
        ``prefix.awaited`` is worth waiting for."""
        match = CachedPrefix()
        if prefix is None or not prefix.reads_cache:
            return match
        if prefix.awaited is not None and prefix.awaited.owner != NOBODY:
            return None
        prefix.awaited = None
        for run in self._walk(self._roots.get(prefix.scope), prefix.tokens, prefix.blocks):
            if run.owner != NOBODY:
                prefix.awaited = run
                continue
            match.runs.append(run)
            match.blocks += len(run.blocks)
            if not run.holders:
                match.idle += len(run.blocks)
        if prefix.awaited is None:
            return match
        self._awaited.add(prefix.awaited)
        return None

    def _walk(self, node: CachedRun | None, tokens: bytes, blocks: int) -> Iterator[CachedRun]:
        """The runs after ``node`` that the first ``blocks`` blocks of a history have. Splits the last one
        where they part."""
        size = self._block_bytes
        end = blocks * size
        while node is not None and (at := node.end * size) < end:
            node = node.children.get(tokens[at : at + size])
            if node is not None:
                if at + len(node.tokens) > end or not tokens.startswith(node.tokens, at):
                    node = self._split(node, self._common(node.tokens, tokens, at, end))
                yield node

    def _common(self, run: bytes, tokens: bytes, at: int, end: int) -> int:
        """Number of blocks at the beginning of ``run`` that are those of ``tokens`` between two bytes."""
        length = min(len(run), end - at) // 4
        differs = np.frombuffer(run, np.int32, length) != np.frombuffer(tokens, np.int32, length, at)
        first = int(differs.argmax())
        return (first if differs[first] else length) // self._blocks.block_size

    def _split(self, run: CachedRun, blocks: int) -> CachedRun:
        """Cut a run after ``blocks`` blocks, at least one. Returns the first part. It is a new one: what is
        known by its end, as the last run of a stream and an awaited run are, stays."""
        parent = run.parent
        assert parent is not None
        size = blocks * self._block_bytes
        first = CachedRun(
            tokens=run.tokens[:size],
            blocks=run.blocks[:blocks].copy(),
            start=run.start,
            parent=parent,
            holders=run.holders,
            owner=run.owner if run.computed < blocks else NOBODY,
            computed=min(run.computed, blocks),
            scope=run.scope,
            keep_s=run.keep_s,
        )
        parent.children[self._key(first)] = first
        run.tokens, run.blocks, run.start = run.tokens[size:], run.blocks[blocks:].copy(), first.end
        run.computed -= first.computed
        run.parent = first
        first.children[self._key(run)] = run
        if not run.holders:
            self._idle.resize(run)
            for idle in self._to_root(first):  # after those that follow it, and before those that it follows
                if idle.holders:
                    break
                self._idle.add(idle)
        return first

    def _key(self, run: CachedRun) -> bytes:
        return run.tokens[: self._block_bytes]

    @staticmethod
    def _to_root(run: CachedRun | None) -> Iterator[CachedRun]:
        """A run and those that it follows, without the root."""
        while run is not None and run.parent is not None:
            yield run
            run = run.parent

    def take_resolved(self) -> Sequence[CachedRun]:
        """The awaited runs whose promise has been fulfilled or withdrawn since the last call."""
        if not self._resolved:
            return ()
        resolved, self._resolved = self._resolved, []
        return resolved

    def record_lookup(self, prefix: Prefix | None, tokens: int, found: CachedPrefix) -> None:
        """Count a lookup of a prompt of ``tokens`` tokens that found ``found``."""
        if prefix is not None and prefix.reads_cache:
            self.queries += tokens
            self.hits += found.blocks * self._blocks.block_size

    # -- streams begin and go on

    def attach(self, slot: int, prefix: Prefix | None, found: CachedPrefix, blocks: int) -> None:
        """Give a slot that has none ``blocks`` blocks: those found, which it shares, and then its own.
        Promise those of its prefix."""
        for run in found.runs:
            self._hold(run)
        if found.runs:
            self._blocks.share(slot, np.concatenate([run.blocks for run in found.runs]))
        self._blocks.allocate_one(slot, blocks - found.blocks)
        self._preempted.pop(slot, None)
        if prefix is None:
            return
        last = found.runs[-1] if found.runs else None
        if prefix.reads_cache and found.blocks < prefix.blocks:
            own = self._blocks.table[slot, found.blocks : prefix.blocks].copy()
            size = self._block_bytes
            tokens = prefix.tokens[found.blocks * size : prefix.blocks * size]
            last = self._add(last or self._root(prefix.scope), tokens, own)
            last.owner, last.computed = slot, 0
        self._held[slot] = _Held(prefix, last, self._resets)

    def _hold(self, run: CachedRun) -> None:
        if not run.holders:
            self._idle.remove(run)
            self._blocks.idle -= len(run.blocks)
        run.holders += 1

    def _root(self, scope: CacheScope) -> CachedRun:
        root = self._roots.get(scope)
        if root is None:
            root = CachedRun(b"", np.zeros(0, np.int32), start=0, parent=None, scope=scope)
            self._roots[scope] = root
        return root

    def _add(self, parent: CachedRun, tokens: bytes, blocks: I32) -> CachedRun:
        """Add a computed run with one holder."""
        run = CachedRun(
            tokens, blocks, parent.end, parent, holders=1, computed=len(blocks), scope=parent.scope
        )
        parent.children[self._key(run)] = run
        return run

    def mark_computed(self, slot: int, tokens: int) -> None:
        """Let others find the full blocks of the first ``tokens`` tokens: they are in the slot's blocks, or
        will be before anyone reads them."""
        held = self._held.get(slot)
        if held is not None and held.resets == self._resets:
            self._fulfil(slot, held.last, tokens // self._blocks.block_size)

    def _fulfil(self, slot: int, run: CachedRun | None, blocks: int) -> None:
        fulfilled = []
        while run is not None and run.owner == slot:
            before = run.computed
            run.computed = min(max(blocks - run.start, 0), len(run.blocks))
            if run.computed > before:
                fulfilled.append((run, before))
            if run.computed == len(run.blocks):
                self._resolve(run)
            run = run.parent
        if self._log is not None:
            for run, before in reversed(fulfilled):  # a block is stored after those that it follows
                self._log_stored(self._log, slot, run, before)

    def _log_stored(self, log: BlockLog, slot: int, run: CachedRun, first: int) -> None:
        """Record that the run's computed blocks from ``first`` on are cached, which are the slot's."""
        parent, size = run.parent, self._block_bytes
        assert parent is not None
        previous = run.blocks[first - 1] if first else parent.blocks[-1] if parent.blocks.size else NULL_BLOCK
        tokens = run.tokens[first * size : run.computed * size]
        pictures: list[list[list[object]]] = []
        if self.spans:
            size = self._blocks.block_size
            start, stop = size * (run.start + first), size * (run.start + run.computed)
            if within := self.spans.within(slot, start, stop):
                tokens = self._table.history[slot, start:stop].tobytes()
                items = [picture.item for picture in within]
                pictures = picture_keys(items, start, size, run.computed - first)
        log.stored(run.blocks[first : run.computed], tokens, int(previous), parent.scope, pictures)

    def _resolve(self, run: CachedRun) -> None:
        run.owner = NOBODY
        if run in self._awaited:
            self._awaited.remove(run)
            self._resolved.append(run)

    # -- streams leave

    def release(self, slot: int, tokens: int, *, forever: bool) -> None:
        """Free the blocks of a slot, in which the first ``tokens`` tokens of its history are computed.

        The output's blocks are cached as well, for the next turn of the conversation, or for the stream's own
        return after preemption (``forever`` False).
        """
        row = self._blocks.take_blocks(slot)
        self._preempted.pop(slot, None)
        held = self._held.pop(slot, None)
        if held is None:
            self._blocks.free(row)
            return
        shared = held.last.end if held.last is not None else 0
        if held.resets != self._resets:
            self._blocks.free(row[shared:])
            for run in self._to_root(held.last):
                run.holders -= 1
                if not run.holders:
                    self._blocks.free(run.blocks)
            return
        full = tokens // self._blocks.block_size
        self._fulfil(slot, held.last, full)
        last = self._withdraw(slot, held.last)
        if shared < full:
            last = self._cache(last or self._root(held.prefix.scope), slot, held.prefix, row[:full])
            shared = full
        self._blocks.free(row[shared:])
        if not forever:
            prefix = held.prefix
            history = self._history(slot, prefix, int(self._table.length[slot]))
            self._preempted[slot] = self._prefix(prefix.scope, history, prefix.reads_cache, prefix.keep_s)
        for run in self._to_root(last):
            run.holders -= 1
            run.keep_s = max(run.keep_s, held.prefix.keep_s)
            if not run.holders:
                self._idle.add(run)
                self._blocks.idle += len(run.blocks)
        if last is not None:
            self._merge(last)

    def _withdraw(self, slot: int, run: CachedRun | None) -> CachedRun | None:
        """Take back what the slot has promised and not computed. Returns the last run that is left."""
        while run is not None and run.owner == slot:
            self._resolve(run)
            self._cut(run, run.computed)
            if run.blocks.size:
                break
            run = run.parent
        return run

    def _cut(self, run: CachedRun, blocks: int) -> None:
        """Free all but the first ``blocks`` blocks of a run without children; without any it is no more."""
        parent = run.parent
        assert parent is not None
        if not blocks:
            del parent.children[self._key(run)]
            if parent.parent is None and not parent.children:
                del self._roots[parent.scope]
        self._blocks.free(run.blocks[blocks:])
        if self._log is not None and blocks < run.computed:
            self._log.removed(run.blocks[blocks : run.computed])
        run.tokens, run.blocks = run.tokens[: blocks * self._block_bytes], run.blocks[:blocks].copy()
        run.computed = min(run.computed, blocks)

    def _history(self, slot: int, prefix: Prefix, length: int) -> bytes:
        """The first ``length`` tokens of a slot's history, which begins with the prefix."""
        known = len(prefix.tokens) // 4
        if length <= known:
            return prefix.tokens[: 4 * length]
        return prefix.tokens + self._table.history[slot, known:length].tobytes()

    def _cache(self, last: CachedRun, slot: int, prefix: Prefix, row: I32) -> CachedRun:
        """Add the slot's computed blocks ``row`` after ``last``, and free those that others have cached
        meanwhile. Returns the last run."""
        history = self._history(slot, prefix, len(row) * self._blocks.block_size)
        for run in self._walk(last, history, len(row)) if last.children else ():
            if run.owner != NOBODY:  # it may be withdrawn, with all that follows it
                self._blocks.free(row[last.end :])
                return last
            self._hold(run)
            self._blocks.free(row[last.end : run.end])
            last = run
        more = row[last.end :]
        if not len(more):
            return last
        tokens = history[last.end * self._block_bytes :]
        first = 0
        if last.parent is None or last.children or last.holders > 1:
            last = self._add(last, tokens, more.copy())
        else:
            first = len(last.blocks)
            last.tokens += tokens
            last.blocks = np.concatenate((last.blocks, more))
            last.computed = len(last.blocks)
        if self._log is not None:
            self._log_stored(self._log, slot, last, first)
        return last

    # -- runs without holders

    def _merge(self, last: CachedRun) -> None:
        """Join the last run to idle ones before it that nothing else follows, while one is at most twice as
        long as what follows it. So many turns leave few runs to look up, and a token is copied few times."""
        run, parent = last, last.parent
        while (
            parent is not None
            and parent.parent is not None
            and not parent.holders
            and parent.keep_s == run.keep_s
            and len(parent.children) == 1
            and len(parent.blocks) <= 2 * len(run.blocks)
        ):
            self._idle.remove(run)
            parent.tokens += run.tokens
            parent.blocks = np.concatenate((parent.blocks, run.blocks))
            parent.computed = len(parent.blocks)
            parent.children = run.children
            for child in run.children.values():
                child.parent = parent
            self._idle.resize(parent)
            run, parent = parent, parent.parent

    def _evict(self, count: int) -> None:
        """Free ``count`` idle blocks."""
        while count:
            run = self._idle.next()
            evicted = min(count, len(run.blocks))
            count -= evicted
            self._blocks.idle -= evicted
            self._cut(run, len(run.blocks) - evicted)
            if run.blocks.size:
                self._idle.resize(run)
            else:
                self._idle.remove(run)

    def forget(self, adapter: AdapterKey) -> None:
        """Free the blocks of an adapter that no stream uses any more."""
        for scope in [each for each in self._roots if each.adapter == adapter]:
            runs = [*self._roots.pop(scope).children.values()]
            while runs:
                run = runs.pop()
                runs += run.children.values()
                self._idle.remove(run)
                self._blocks.idle -= len(run.blocks)
                self._blocks.free(run.blocks)
                if self._log is not None:
                    self._log.removed(run.blocks)

    def reset(self) -> None:
        """Forget all cached blocks. Running streams continue, but their blocks will not be cached."""
        for run in self._idle:
            self._blocks.free(run.blocks)
        self._blocks.idle = 0
        self._idle.clear()
        self._roots.clear()
        self._preempted.clear()
        for run in self._awaited:
            run.owner = NOBODY
        self._resolved += self._awaited
        self._awaited.clear()
        self._resets += 1
        if self._log is not None:
            self._log.cleared()
