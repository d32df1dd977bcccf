"""What knowing the caches is worth: hit rates of a fleet under a trace of agents, routed with and without."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.schedule.scheduler import Scheduler
from penstock.gateway.kv_events.block_index import BlockIndex, Source
from penstock.gateway.routing.cached_prompts import CachedPrompt
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import prefix_blocks
from tests.engine.paged import make_scheduler
from tests.engine.support import submit

SERVERS, GATEWAYS, BLOCKS, BLOCK = 4, 2, 400, 16
"""6,400 tokens of cache at each server, less than the running sessions have."""
SESSIONS, RUNNING, TURNS = 60, 12, 8
SYSTEM, TASK, TURN = 1000, 300, 120
"""Tokens of what all agents of a kind share (instructions, tools), of a task, and of what a turn adds."""


def trace(seed: int) -> Iterator[list[int]]:
    """Prompts of agents of six kinds: each turn repeats all before it, a few sessions run at a time, and some
    branch off sub-agents that share their beginning."""
    rng = random.Random(seed)
    kinds = [[rng.randrange(50) for _ in range(SYSTEM)] for _ in range(6)]

    def more(count: int) -> list[int]:
        return [rng.randrange(50) for _ in range(count)]

    waiting = [rng.choice(kinds) + more(TASK) for _ in range(SESSIONS)]
    running: list[list[list[int]]] = []
    while waiting or running:
        while waiting and len(running) < RUNNING:
            running.append([waiting.pop()])
        session = rng.choice(running)
        prompt = session[-1] if len(session) == 1 else session[-1] + more(TURN)
        session.append(prompt)
        yield prompt
        if len(session) == 4 and rng.random() < 0.3 and len(running) < RUNNING + 2:
            running.append([prompt + more(TURN)])
        if len(session) > TURNS:
            running.remove(session)


class Fleet:
    """Servers that are nothing but their prefix caches, behind several gateways."""

    def __init__(self, *, precise: bool, direct: float = 0.0) -> None:
        """``direct``: share of the requests that no gateway sends."""
        self._precise = precise
        self._direct = direct
        self._index = BlockIndex()
        self._rng = random.Random(2)
        scorers = {"queue": 2.0, "running": 1.0, "prefix": 2.0}
        self._pickers = [Picker(scorers, rng=random.Random(1)) for _ in range(GATEWAYS)]
        self._servers: dict[Endpoint, tuple[Source, BlockLog, Scheduler]] = {}
        for number in range(SERVERS):
            source, log = Source(Endpoint(f"http://{number}")), BlockLog(BLOCKS, BLOCK)
            self._index.follow(source)
            self._servers[source.endpoint] = (
                source,
                log,
                make_scheduler(
                    4, BLOCKS, block_size=BLOCK, model_len=4096, block_log=log, max_num_batched_tokens=4096
                ),
            )

    def hit_rate(self, prompts: Iterator[list[int]]) -> float:
        """Share of the prompts' tokens that servers had cached."""
        for number, prompt in enumerate(prompts):
            self._send(number, prompt)
        caches = [scheduler.prefix_cache for _, _, scheduler in self._servers.values()]
        return sum(cache.hits for cache in caches) / sum(cache.queries for cache in caches)

    def _send(self, number: int, prompt: list[int]) -> None:
        endpoints, tokens = [*self._servers], np.array(prompt, np.int32).tobytes()
        request = PickRequest(blocks=prefix_blocks("m", tokens), tokens=len(prompt))
        if self._precise:
            found = self._index.cached(tokens, endpoints, float(number))
            if any(found.values()):
                shares = {endpoint: count / len(prompt) for endpoint, count in found.items()}
                request.prompt = CachedPrompt(tokens, shares=shares)
        if self._rng.random() < self._direct:
            endpoint = self._rng.choice(endpoints)
        else:
            endpoint = self._rng.choice(self._pickers).pick(request, endpoints, float(number))
        source, log, scheduler = self._servers[endpoint]
        scheduler.submit(0, submit(number, 4, prompt=prompt))
        while scheduler.has_work():
            batch = scheduler.schedule()
            scheduler.mark_launched(batch)
            scheduler.update_from_output(batch, np.zeros(len(batch.samples), np.int32), None)
        self._index.apply(source, log.take_events())


def test_knowing_the_caches_beats_guessing_them() -> None:
    """Each gateway sees what it has sent itself, but the events of all: what others have sent as well."""
    guessed, known = (Fleet(precise=precise, direct=0.3).hit_rate(trace(7)) for precise in (False, True))
    print(f"{guessed:.3f} of the prompts' tokens were cached where guessed, {known:.3f} where known")
    assert known > guessed + 0.05


def test_gateways_that_send_all_guess_as_well_as_they_know() -> None:
    """What a gateway has not seen itself it takes to be where its hash says, where the other one sends it."""
    guessed, known = (Fleet(precise=precise).hit_rate(trace(7)) for precise in (False, True))
    assert guessed > 0.85
    assert guessed > known - 0.02
