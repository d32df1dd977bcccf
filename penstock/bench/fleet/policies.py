"""Ways of choosing a server of the simulated fleet: the gateway's own picker, and others to compare with."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from penstock.bench.fleet.simulated_server import SimulatedRequest
from penstock.bench.fleet.traces import BLOCK_TOKENS
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_BYTES, BLOCK_ENDS
from penstock.gateway.scorer_weights import read_weights

_LAST_BLOCKS = [end // BLOCK_BYTES - 1 for end in BLOCK_ENDS]
"""The last block of 256 bytes, 64 tokens, of each block that the gateway compares."""


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """What a scrape of a server's metrics says."""

    waiting: int
    running: int
    kv_used: float


class Policy(Protocol):
    """Chooses servers by their numbers."""

    scrape_interval_s: float
    """0: it needs no metrics."""

    def pick(self, request: SimulatedRequest, now: float) -> int: ...

    def on_scrape(self, server: int, load: ReportedLoad, now: float) -> None: ...

    def on_end(self, request: SimulatedRequest, now: float) -> None: ...


class _Blind:
    """A policy without metrics."""

    scrape_interval_s = 0.0

    def on_scrape(self, server: int, load: ReportedLoad, now: float) -> None:
        """Ignore the scraped loads."""

    def on_end(self, request: SimulatedRequest, now: float) -> None:
        """Ignore the end of a request."""


class RandomPolicy(_Blind):
    """Any server."""

    def __init__(self, servers: int, rng: random.Random) -> None:
        self._servers, self._rng = servers, rng

    def pick(self, request: SimulatedRequest, now: float) -> int:
        return self._rng.randrange(self._servers)


class RoundRobin(_Blind):
    """One server after the other."""

    def __init__(self, servers: int, rng: random.Random) -> None:
        self._next = cycle(range(servers))

    def pick(self, request: SimulatedRequest, now: float) -> int:
        return next(self._next)


class LeastLoaded(_Blind):
    """The server with the fewest requests in flight; any of several."""

    def __init__(self, servers: int, rng: random.Random) -> None:
        self._in_flight, self._rng = [0] * servers, rng

    def pick(self, request: SimulatedRequest, now: float) -> int:
        fewest = min(self._in_flight)
        row = self._rng.choice([row for row, load in enumerate(self._in_flight) if load == fewest])
        self._in_flight[row] += 1
        return row

    def on_end(self, request: SimulatedRequest, now: float) -> None:
        self._in_flight[request.server] -= 1


class InferenceExtensionDefaults:
    """The scheduler that the Gateway API Inference Extension publishes, with its default profile: scorers of
    the queue (2), the free KV cache (2) and the prefix (3), the best score, metrics every 50 ms.

    Its prefix index has 256 blocks of 16 tokens of a prompt, and 31,250 blocks per server.
    """

    scrape_interval_s = 0.05
    _MATCHED = 256 * 16 // BLOCK_TOKENS
    _PER_SERVER = 31_250 * 16 // BLOCK_TOKENS

    def __init__(self, servers: int, rng: random.Random) -> None:
        self._rng = rng
        self._waiting = [0] * servers
        self._kv_used = [0.0] * servers
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(servers)]

    def pick(self, request: SimulatedRequest, now: float) -> int:
        blocks = request.turn.blocks[: self._MATCHED]
        low, high = min(self._waiting), max(self._waiting)
        scores = []
        for row, waiting in enumerate(self._waiting):
            queue = 1.0 if high == low else (high - waiting) / (high - low)
            matched, sent = 0, self._sent[row]
            for block in blocks:
                if block not in sent:
                    break
                matched += 1
            prefix = matched / len(blocks) if blocks else 0.0
            scores.append(2 * queue + 2 * (1 - self._kv_used[row]) + 3 * prefix)
        best = max(scores)
        row = self._rng.choice([row for row, score in enumerate(scores) if score == best])
        sent = self._sent[row]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._PER_SERVER:
            sent.popitem(last=False)
        return row

    def on_scrape(self, server: int, load: ReportedLoad, now: float) -> None:
        self._waiting[server], self._kv_used[server] = load.waiting, load.kv_used

    def on_end(self, request: SimulatedRequest, now: float) -> None:
        """Ignore the end of a request, which the metrics show."""


class OwnPicker:
    """The picker of ``penstock gateway``, with these scorers."""

    scrape_interval_s = 0.5

    def __init__(self, servers: int, rng: random.Random, scorers: str, *, sessions: bool = True) -> None:
        """``sessions``: clients name them."""
        self._sessions = sessions
        self._picker = Picker(read_weights(scorers, None), rng=rng)
        self._endpoints = [Endpoint(f"http://10.0.{row >> 8}.{row & 255}:8000") for row in range(servers)]
        self._rows = {endpoint: row for row, endpoint in enumerate(self._endpoints)}

    def pick(self, request: SimulatedRequest, now: float) -> int:
        turn = request.turn
        blocks = [turn.blocks[row] for row in _LAST_BLOCKS if row < len(turn.blocks)]
        session = str(request.conversation) if self._sessions else None
        wanted = PickRequest(blocks=blocks, session=session, tokens=turn.tokens)
        endpoint = self._picker.pick(wanted, self._endpoints, now)
        endpoint.request_sent(turn.tokens, now)
        return self._rows[endpoint]

    def on_scrape(self, server: int, load: ReportedLoad, now: float) -> None:
        reported = EndpointLoad(load.waiting, load.running, load.kv_used)
        self._endpoints[server].scrape_succeeded(reported, now)

    def on_end(self, request: SimulatedRequest, now: float) -> None:
        self._endpoints[request.server].request_ended(request.turn.tokens)


OTHERS: dict[str, Callable[[int, random.Random], Policy]] = {
    "random": RandomPolicy,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "inference-extension": InferenceExtensionDefaults,
}
"""The policies to compare with."""
