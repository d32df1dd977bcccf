"""Pauses, weights and streams in any order: every token is of the version that its frame tells."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected, StepRows
from penstock.engine.loop.loop_states import LoopStates
from penstock.engine.loop.publisher import Publisher
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.engine.synthetic.weights import VERSION
from penstock.engine.vocabulary import read_vocabulary
from penstock.wire.messages import PAUSE, WEIGHTS, DesiredState
from tests.dispatch.state_world import Inline
from tests.engine.support import submit
from tests.engine.weights.versions import Versions

MODES = ["abort", "wait", "keep"]
ACTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 60), st.sampled_from([1, 7])),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("pause"), st.booleans(), st.sampled_from(MODES), st.booleans()),
    st.tuples(
        st.just("weights"), st.integers(1, 255), st.sampled_from(MODES), st.booleans(), st.sampled_from("nhr")
    ),
)
"""Of weights: n: not settled yet, h: a hold, r: a rollback."""


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        for version in range(1, 256):
            save_file({VERSION: np.array([version], np.uint8)}, Path(directory) / str(version))
        yield Path(directory)


class Rig:
    """An engine with its states, stepped as the loop does, and one API server that reads."""

    def __init__(self, model_dir: Path, files: Path) -> None:
        config = ServeConfig(engine="synthetic", synthetic_step_ms=0, max_num_seqs=3)
        self.engine = SyntheticEngine(config, str(model_dir))
        self.publisher = Publisher(self)
        self.peer = self.publisher.attach(0, b"zero")
        self.received = Versions()
        self.states = LoopStates(
            self.engine,
            self.publisher,
            None,
            in_wave=lambda: False,
            publish=self.publish,
            beat=lambda: None,
            clock=lambda: self.now,
        )
        self.states._weights._executor = Inline()
        self.files = files
        self.now = 0.0
        self.streams = 0
        self.refused: set[int] = set()
        self.desired: dict[str, DesiredState] = {}
        self.paused = False

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        self.received.parts(parts)
        return True

    def publish(self, rows: StepRows) -> None:
        self.publisher.publish(self.publisher.peers.to_handles(rows), self.engine.load())

    def submit(self, max_tokens: int, interval: int) -> None:
        self.streams += 1
        if self.states.refusal() is not None:
            self.refused.add(self.streams)
            return
        number = self.publisher.peers.open(self.peer, self.streams)
        try:
            self.engine.submit(0, submit(number, max_tokens, interval=interval, seed=self.streams))
        except RequestRejected:
            self.publisher.peers.close(self.peer, self.streams)
            self.refused.add(self.streams)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            self.states.advance()
            before = sum(map(len, self.received.tokens.values()))
            if self.engine.can_step():
                self.publish(self.engine.step())
            if self.is_paused():
                assert sum(map(len, self.received.tokens.values())) == before

    def is_paused(self) -> bool:
        applied = self.states.reconciler._states[PAUSE]
        observed = applied.observed
        return observed is not None and observed == self.observed(PAUSE) and bool(observed.result["paused"])

    def observed(self, name: str) -> Any:
        desired, found = self.desired.get(name), self.states.reconciler._states[name].observed
        return found if desired and found and found.generation == desired.generation else None

    def abort(self, handle: int) -> None:
        if handle in self.peer.streams:
            self.engine.abort(0, [self.peer.streams[handle]])

    def desire(self, name: str, value: dict[str, Any], **flags: bool) -> None:
        earlier = self.desired.get(name)
        state = DesiredState(name, 1 if earlier is None else earlier.generation + 1, value, **flags)
        self.desired[name] = state
        self.states.reconciler.apply(0, [state])

    def pause(self, paused: bool, mode: str, rollback: bool) -> None:
        self.desire(PAUSE, {"paused": paused, "mode": mode}, rollback=rollback)

    def weights(self, version: int, streams: str, keep: bool, kind: str) -> None:
        value = {
            "version": str(version),
            "sources": [{"path": str(self.files / str(version))}],
            "streams": streams,
            "cache": "keep" if keep else "drop",
            "hold": kind == "h",
        }
        self.desire(WEIGHTS, value, rollback=kind == "r")


@given(st.lists(ACTS, max_size=40))
def test_in_any_order(model_dir: Path, files: Path, acts: list[tuple[Any, ...]]) -> None:
    rig = Rig(model_dir, files)
    for name, *arguments in acts:
        getattr(rig, name)(*arguments)
    rig.weights(9, "keep", False, "r")
    rig.pause(False, "abort", True)
    rig.submit(5, 1)
    rig.step(1000)
    received = rig.received
    assert rig.observed(WEIGHTS).error is None
    assert not rig.is_paused()
    assert received.finish.keys() == set(range(1, rig.streams + 1)) - rig.refused
    assert received.failed == {}
    versions = {state.result["generation"]: state.result["version"] for state in received.observed}
    ordinary = {int(token): place for place, token in enumerate(read_vocabulary(model_dir).ordinary)}
    for stream, tokens in received.tokens.items():
        for token, generation in zip(tokens, received.generations[stream], strict=True):
            if generation:
                assert ordinary[token] % 256 == int(str(versions[generation]))
