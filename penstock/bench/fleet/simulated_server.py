"""A model server as a simulation: continuous batching, chunked prefill, a KV cache with reuse of prefixes."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from penstock.bench.fleet.traces import BLOCK_TOKENS, TraceTurn


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The costs of one server: about an 8B model on a GPU of 80 GB."""

    step_s: float = 0.010
    """Duration of a step with nothing in it."""
    prefill_s: float = 1 / 18_000
    """Seconds per prompt token in a step."""
    decode_s: float = 0.00006
    """Seconds per sequence that decodes in a step."""
    step_tokens: int = 8192
    """Most tokens of a step."""
    sequences: int = 256
    """Most sequences at a time."""
    kv_tokens: int = 400_000


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A turn at a server. Times are seconds of the simulation."""

    turn: TraceTurn
    sent_at: float
    conversation: int = 0
    server: int = -1
    cached_tokens: int = 0
    first_token_at: float = 0.0
    left_to_prefill: int = 0
    own_blocks: int = 0
    """Blocks that it holds without a name: those of its output."""


@dataclass(slots=True)
class _KVCache:
    """Blocks by name; those that no running request holds stay until their place is needed."""

    capacity: int
    _held: dict[int, int] = field(default_factory=dict)
    """Requests that hold each block."""
    _kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _unnamed: int = 0

    @property
    def used(self) -> float:
        """Share that running requests hold."""
        return (len(self._held) + self._unnamed) / self.capacity

    def take(self, blocks: tuple[int, ...], unnamed: int) -> int | None:
        """Hold these blocks, and ``unnamed`` ones. Returns how many of the leading ones had been computed;
        None: there is no room."""
        held, kept = self._held, self._kept
        hit = 0
        for block in blocks:
            if block not in held and block not in kept:
                break
            hit += 1
        fresh = sum(block not in held for block in blocks)
        if len(held) + self._unnamed + fresh + unnamed > self.capacity:
            return None
        for block in blocks:
            if block in held:
                held[block] += 1
            else:
                kept.pop(block, None)
                held[block] = 1
        self._unnamed += unnamed
        while len(held) + self._unnamed + len(kept) > self.capacity:
            kept.popitem(last=False)
        return hit

    def release(self, blocks: tuple[int, ...], unnamed: int, after: tuple[int, ...]) -> None:
        """End a request: its blocks are kept, with those of its output, named by ``after``."""
        held, kept = self._held, self._kept
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                del held[block]
                kept[block] = None
        self._unnamed -= unnamed
        for block in after[len(blocks) :]:
            kept[block] = None
        while len(held) + self._unnamed + len(kept) > self.capacity:
            kept.popitem(last=False)


class SimulatedServer:
    """Steps one after the other while there is work; :meth:`begin_step` and :meth:`end_step` by turns."""

    def __init__(self, model: ServerModel) -> None:
        self._model = model
        self._cache = _KVCache(model.kv_tokens // BLOCK_TOKENS)
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []
        """Heap of (last step, number, request)."""
        self._step = self._number = 0
        self._prefilled: list[SimulatedRequest] = []
        self.busy = False
        """A step is under way."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._prefilled) + len(self._decoding)

    @property
    def kv_used(self) -> float:
        return self._cache.used

    def submit(self, request: SimulatedRequest) -> None:
        self._waiting.append(request)

    def begin_step(self) -> float | None:
        """The duration of the next step; None: there is nothing to do."""
        self._admit()
        model, budget = self._model, self._model.step_tokens - len(self._decoding)
        tokens = 0
        while self._prefilling and budget > 0:
            request = self._prefilling[0]
            part = min(budget, request.left_to_prefill)
            request.left_to_prefill -= part
            budget -= part
            tokens += part
            if request.left_to_prefill:
                break
            self._prefilled.append(self._prefilling.popleft())
        self.busy = bool(tokens or self._decoding)
        if not self.busy:
            return None
        return model.step_s + tokens * model.prefill_s + len(self._decoding) * model.decode_s

    def end_step(self, now: float) -> list[SimulatedRequest]:
        """End the step at ``now``; returns the requests that it has finished."""
        self._step += 1
        finished = []
        while self._decoding and self._decoding[0][0] <= self._step:
            request = heappop(self._decoding)[2]
            finished.append(request)
            turn = request.turn
            self._cache.release(turn.blocks, request.own_blocks, turn.blocks_after)
        for request in self._prefilled:
            request.first_token_at = now
            self._number += 1
            heappush(self._decoding, (self._step + request.turn.output_tokens - 1, self._number, request))
        self._prefilled.clear()
        return finished

    def _admit(self) -> None:
        while self._waiting and self.running < self._model.sequences:
            request = self._waiting[0]
            turn = request.turn
            own = turn.output_tokens // BLOCK_TOKENS + 1
            hit = self._cache.take(turn.blocks, own)
            if hit is None:
                return
            request.own_blocks = own
            request.cached_tokens = min(hit * BLOCK_TOKENS, turn.tokens - 1)
            request.left_to_prefill = turn.tokens - request.cached_tokens
            self._prefilling.append(self._waiting.popleft())
