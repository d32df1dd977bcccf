"""Admission: which streams may begin, from the waiting queue and among the preempted ones.

A stream is admitted in the order of the queue, when a slot is free and the KV cache has room for its whole
prompt. One whose grammar is being compiled, whose prefix another stream is computing, whose adapter has no
place, or whose pictures are on the way is held, in nobody's way.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter, adapter_of
from penstock.engine.sampling.grammar_compiler import Compilation, CompilationState
from penstock.engine.schedule.cache_scope import CacheScope
from penstock.engine.schedule.prefix_cache import CachedPrefix, Prefix
from penstock.engine.schedule.running_streams import RunningStreams
from penstock.engine.schedule.submit_checks import check_request
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.wire.messages import MEDIA_GONE, Submit, WireError

GRAMMAR_ROOM = "room for a grammar"
"""What streams wait for whose grammar's text is too long beside those of the running streams."""
PAGES_GONE = "what was prepared of a picture is gone; send the request again"
NO_ROOM_FOR_PAGES = "the engine's host has no room for a picture (--media-cache)"
MAX_HELD_PER_STEP = 128
"""Waiting streams that a step may find unable to start yet: their grammar is being compiled, or another
stream is computing their prefix, or other adapters run. They are held, and the next step looks at those
behind them."""


class SlotAdmission:
    """The waiting queue, and the ways of its streams into slots."""

    def __init__(self, streams: RunningStreams, config: ServeConfig, adapters: AdapterTable | None) -> None:
        self._streams = streams
        self._table = streams.table
        self._sampling = streams.sampling
        self._blocks = streams.blocks
        self._prefix_cache = streams.prefix_cache
        self._shortage = streams.shortage
        self._adapters = adapters
        self.queue = WaitingQueue(config, self._withdraw_compilation)
        self.takes_newcomers = True
        """False: streams that wait do not begin."""

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected when it could never finish or the queue is full, WireError
        when its handle is in use."""
        if self._table.find_slot(server, request.stream) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        routes = self._streams.routes
        check_request(
            request, self._table.max_model_len, self._sampling.vocab_size, has_routes=routes is not None
        )
        if routes is not None:
            routes.check(request)
        if self._streams.media is not None:
            self._streams.media.check(request)
        adapter = adapter_of(request, self._adapters)
        self._check_capacity(request)
        self._sampling.check_sampling(request.sampling)
        compilation = None
        if request.sampling.grammar is not None:
            compilation = self._sampling.grammars.request(server, request.sampling.grammar)
        try:
            free = self._table.free_count()
            self.queue.push(server, request, free, adapter).compilation = compilation
        except ValueError:
            if compilation is not None:
                self._sampling.grammars.withdraw(compilation)
            raise

    def _withdraw_compilation(self, waiting: WaitingStream) -> None:
        if waiting.compilation is not None:
            self._sampling.grammars.withdraw(waiting.compilation)

    def _check_capacity(self, request: Submit) -> None:
        base = len(request.prompt) // 4 - request.resumed
        end = min(base + request.sampling.max_tokens, self._table.max_model_len)
        capacity = self._blocks.blocks * self._blocks.block_size
        if end - 1 > capacity:  # the last token is never read back
            raise RequestRejected(
                f"prompt and max_tokens: {base} + {end - base} tokens do not fit the KV cache, "
                f"which holds {capacity}; ask for fewer tokens or serve with more --kv-cache-memory"
            )

    def has_newcomers(self) -> bool:
        """Whether a stream waits, a slot is free, and newcomers are taken."""
        return bool(self.queue) and self._table.free_count() > 0 and self.takes_newcomers

    # -- streams that are held

    def release_held(self) -> None:
        """Let the streams begin whose adapter has room, whose prefix is computed or whose grammar is
        compiled; end those whose grammar is not valid."""
        if self._streams.adapter_room is not None:
            for adapter in self._streams.adapter_room.take_ready():
                self.queue.release(self._streams.adapter_room.awaited_by(adapter))
        for digest in self._prefix_cache.take_resolved():
            self.queue.release(digest)
        if self._streams.has_freed_grammar:
            self._streams.has_freed_grammar = False
            self.queue.release(GRAMMAR_ROOM)
        for compilation in self._sampling.grammars.take_finished():
            for waiting in self.queue.release(compilation):
                if compilation.error is not None:
                    self.queue.fail(waiting, compilation.error.code, str(compilation.error))

    def settle_pages(self) -> StepRows:
        """Let streams look again whose pictures' pages have come; end those whose pages will not come."""
        streams, ended = self._streams, []
        assert streams.media is not None
        for want, code in streams.media.pages.take_settled():
            released = self.queue.release(want)
            if code:
                message = PAGES_GONE if code == MEDIA_GONE else NO_ROOM_FOR_PAGES
                for waiting in released:
                    self.queue.fail(waiting, code, message)
                slots = streams.media.waits_for(want, streams.computed)
                ended.append(streams.fail(np.array(slots, np.intp), code, message))
        return concat_rows(ended)

    # -- streams that begin

    def begin_streams(self) -> Iterator[int]:
        """Allocate blocks to streams that have none, one stream at a time, and yield their slots.

        The most important stream comes first, among equals a preempted one, then the longest-waiting. One
        that cannot start yet is held, in nobody's way. Stops at the first one that does not fit: smaller ones
        do not overtake it.
        """
        for candidate in self._candidates():
            if not self._may_start(candidate):
                continue
            prefix, length = self._history_of(candidate)
            found = self._prefix_cache.find_prefix(prefix)
            if found is None:
                if isinstance(candidate, WaitingStream) and prefix is not None:
                    self.queue.hold(candidate, prefix.awaited)
                continue
            if not self._has_room(length, found) or not self._has_route_room(candidate):
                return
            if self._streams.media is not None and not self._has_pictures(candidate, found):
                continue
            slot = self._admit(candidate, found) if isinstance(candidate, WaitingStream) else candidate
            self._begin(slot, prefix, found)
            yield slot

    def _candidates(self) -> Iterator[int | WaitingStream]:
        """Slots of preempted streams and, if slots are free, waiting streams, in order of priority."""
        slots = self._streams.admitted
        has_blocks = self._blocks.block_counts[slots] > 0
        without_blocks = ~has_blocks & (self._table.in_flight_tokens[slots] == 0)
        if self._shortage and np.count_nonzero(has_blocks):
            without_blocks &= self._shortage.may_begin(slots, self._streams.steps)
        preempted: list[int] = slots[without_blocks].tolist()
        free = self._table.free_count() if self.takes_newcomers else 0
        newcomers = list(islice(self.queue, free + MAX_HELD_PER_STEP)) if free else []
        return merge(preempted, newcomers, key=self._priority_of)

    def _priority_of(self, candidate: int | WaitingStream) -> int:
        return (
            candidate.priority
            if isinstance(candidate, WaitingStream)
            else int(self._streams.priority[candidate])
        )

    def _may_start(self, candidate: int | WaitingStream) -> bool:
        """False without a free slot, or if the grammar is not compiled or the adapter has no room: then the
        stream is held or failed."""
        if not isinstance(candidate, WaitingStream):
            return True
        if not self._table.free_count():
            return False
        if candidate.compilation is not None:
            try:
                if not self._has_grammar(candidate, candidate.compilation):
                    return False
            except RequestRejected as error:
                self.queue.fail(candidate, error.code, str(error))
                return False
        return candidate.adapter is None or self._has_adapter_room(candidate, candidate.adapter)

    def _has_adapter_room(self, waiting: WaitingStream, adapter: LoadedAdapter) -> bool:
        """Whether the adapter may run in the next step; otherwise the stream is held until it may."""
        assert self._streams.adapter_room is not None
        if self._streams.adapter_room.may_start(adapter):
            return True
        self.queue.hold(waiting, self._streams.adapter_room.awaited_by(adapter))
        return False

    def _has_grammar(self, waiting: WaitingStream, compilation: Compilation) -> bool:
        """Whether the grammar is compiled; otherwise the stream is held until it is. Raises RequestRejected
        for a grammar that is not valid or contradicts other constraints."""
        sampling = waiting.request.sampling
        if compilation.state is CompilationState.EVICTED:  # it was compiled long ago
            assert sampling.grammar is not None
            compilation = self._sampling.grammars.request(waiting.server, sampling.grammar)
            self._withdraw_compilation(waiting)
            waiting.compilation = compilation
        if compilation.state is not CompilationState.DONE:
            self.queue.hold(waiting, compilation)
            return False
        if compilation.error is not None:
            raise compilation.error
        contradiction = self._sampling.contradiction(sampling, compilation)
        if contradiction is not None and not waiting.request.resumed:
            raise RequestRejected(contradiction)
        if not self._sampling.grammars.has_room(compilation):
            self.queue.hold(waiting, GRAMMAR_ROOM)
            return False
        return True

    def _history_of(self, candidate: int | WaitingStream) -> tuple[Prefix | None, int]:
        """Prefix and length of the candidate's history."""
        if isinstance(candidate, WaitingStream):
            if candidate.prefix is None:
                candidate.prefix = self._prefix_cache.prefix_of(candidate.request, candidate.adapter)
            return candidate.prefix, candidate.tokens
        return self._prefix_cache.prefix_of_preempted(candidate), int(self._table.length[candidate])

    def _has_room(self, length: int, found: CachedPrefix) -> bool:
        """Whether ``length`` tokens, of which the blocks ``found`` are cached, fit and leave one free block
        for every stream that has blocks.

        Without that margin a preempted stream would return only to be preempted again.
        """
        margin = int(np.count_nonzero(self._blocks.block_counts[self._streams.admitted]))
        wanted = self._blocks.blocks_for(length) - found.blocks + found.idle
        return wanted + margin <= self._blocks.free_count()

    def _has_pictures(self, candidate: int | WaitingStream, found: CachedPrefix) -> bool:
        """Whether its pictures can be encoded; otherwise it waits for their pages."""
        media, start = self._streams.media, found.blocks * self._blocks.block_size
        assert media is not None
        if not isinstance(candidate, WaitingStream):
            server = int(self._table.server[candidate])
            return media.missing(server, media.spans.of(candidate), start) is None
        want = media.missing(candidate.server, candidate.request.media, start)
        if want is not None:
            self.queue.hold(candidate, want)
        return want is None

    def _has_route_room(self, candidate: int | WaitingStream) -> bool:
        """Whether there is memory for the experts of its tokens, if it asks for these."""
        routes = self._streams.routes
        return routes is None or isinstance(candidate, int) or routes.has_room(candidate.request)

    def _admit(self, newcomer: WaitingStream, found: CachedPrefix) -> int:
        """Move a waiting stream into a free slot; there is room for its prompt."""
        streams = self._streams
        self.queue.remove(newcomer)
        slot = streams.table.allocate(newcomer.server, newcomer.request, newcomer.adapter)
        if streams.adapter_room is not None and newcomer.adapter is not None:
            streams.adapter_room.start(slot, newcomer.adapter)
        streams.sampling.set(slot, newcomer.request.sampling, newcomer.compilation)
        if streams.routes is not None:
            streams.routes.begin(slot, newcomer.request)
        if streams.media is not None:
            streams.media.begin(slot, newcomer.request.media, found.blocks * streams.blocks.block_size)
        streams.add(slot, newcomer.priority)
        if streams.speculation is not None:
            scope = CacheScope(newcomer.request.cache_salt, newcomer.request.adapter_key)
            streams.speculation.begin(slot, int.from_bytes(scope.seed(8), "little", signed=True))
        streams.prefix_cache.record_lookup(newcomer.prefix, newcomer.tokens, found)
        if not newcomer.request.resumed:  # the engine that ran it before has reported its cached tokens
            streams.table.cached[slot] = found.blocks * streams.blocks.block_size
        return slot

    def _begin(self, slot: int, prefix: Prefix | None, found: CachedPrefix) -> None:
        """Allocate blocks for a stream's whole history, so that a begun prefill never waits for memory."""
        wanted = self._blocks.blocks_for(int(self._table.length[slot]))
        self._prefix_cache.attach(slot, prefix, found, wanted)
        self._streams.computed[slot] = found.blocks * self._blocks.block_size
        if self._streams.speculation is not None:
            self._streams.speculation.restart(slot)
