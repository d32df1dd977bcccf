"""Weights that change by the messages of API servers: what their streams see."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.engine.synthetic.weights import VERSION
from penstock.engine.vocabulary import read_vocabulary
from penstock.engine.weights.weight_loader import BrokenWeights, WeightPlan
from penstock.wire.frames import FinishReason
from penstock.wire.messages import PAUSE, WEIGHTS, ApplyStates, DesiredState, GoAway, ObservedState
from penstock.wire.weights.desired import WeightSource
from tests.engine.loops import ENDLESS, Host
from tests.engine.peers import DEADLINE_S, ApiServer
from tests.engine.support import submit
from tests.engine.weights.versions import Versions

Start = Callable[..., Host]
Connect = Callable[..., ApiServer]


class Trainer:
    """Sets weights, and reads what the engine says of them."""

    def __init__(self, peer: ApiServer, directory: Path, ordinary: Any) -> None:
        self.peer, self.directory = peer, directory
        peer.received = self.received = Versions()
        self.generation = 0
        self._places = {int(token): place for place, token in enumerate(ordinary)}

    def file(self, version: int) -> str:
        path = self.directory / f"{version}.safetensors"
        save_file({VERSION: np.array([version], np.uint8)}, path)
        return str(path)

    def ask(self, version: int, *, settled: bool = False, rollback: bool = False, **value: Any) -> None:
        self.generation += 1
        whole = {"version": f"v{version}", "sources": [{"path": self.file(version)}], **value}
        if not version:
            whole = value
        state = DesiredState(WEIGHTS, self.generation, whole, settled=settled, rollback=rollback)
        self.peer.send(ApplyStates([state]))

    def observed(self) -> ObservedState | None:
        found = [state for state in self.received.observed if state.generation == self.generation]
        return found[-1] if found else None

    def wait(self) -> ObservedState:
        self.peer.read(lambda: self.observed() is not None)
        state = self.observed()
        assert state is not None
        return state

    def set(self, version: int, **value: Any) -> ObservedState:
        self.ask(version, **value)
        return self.wait()

    def versions(self, stream: int) -> list[int]:
        """What each token tells of its version; only for versions above 0."""
        return [self._places[token] % 256 for token in self.received.tokens[stream]]


@pytest.fixture
def engine(host: Start) -> Host:
    return host(max_num_seqs=4, synthetic_step_ms=1)


@pytest.fixture
def trainer(engine: Host, connect: Connect, tmp_path: Path, model_dir: Path) -> Trainer:
    return Trainer(connect(), tmp_path, read_vocabulary(model_dir).ordinary)


def run_some(trainer: Trainer, *streams: int, more: int = 5) -> None:
    received = trainer.received
    counts = {stream: len(received.tokens.get(stream, [])) + more for stream in streams}
    trainer.peer.read(lambda: all(len(received.tokens.get(each, [])) > counts[each] for each in streams))


def test_each_token_tells_its_version_and_each_frame_its_generation(trainer: Trainer) -> None:
    trainer.peer.send(submit(1, ENDLESS), submit(2, ENDLESS, interval=7))
    for version in range(1, 40):
        result = trainer.set(version).result
        assert result == {"version": f"v{version}", "generation": version, "checksum": None, "loaded": 1}
        run_some(trainer, 1, 2, more=10)
    received = trainer.received
    for stream in (1, 2):
        told = trainer.versions(stream)
        generations = received.generations[stream]
        assert [each for each, generation in zip(told, generations, strict=True) if generation] == [
            generation for generation in generations if generation
        ]
        assert set(generations) >= set(range(1, 40))
        assert generations == sorted(generations)


def test_streams_finish_with_the_weights_they_began_with(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, 300), submit(2, 300))
    run_some(trainer, 1, 2)
    trainer.ask(2, streams="wait")
    trainer.peer.send(submit(3, 5))
    assert trainer.wait().error is None
    trainer.peer.read_ends(1, 2, 3)
    assert [set(trainer.versions(stream)) for stream in (1, 2, 3)] == [{1}, {1}, {2}]
    assert len(trainer.received.tokens[1]) == 300


@pytest.mark.parametrize("first", ["pause", "update"])
def test_streams_that_a_pause_keeps_are_not_waited_for(trainer: Trainer, first: str) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, ENDLESS))
    run_some(trainer, 1)
    pause = ApplyStates([DesiredState(PAUSE, 1, {"paused": True, "mode": "keep"})])
    if first == "pause":
        trainer.peer.send(pause)
        trainer.ask(2, streams="wait")
    else:
        trainer.ask(2, streams="wait")
        run_some(trainer, 1)
        trainer.peer.send(pause)
    observed = trainer.wait()
    assert observed.result["version"] == "v1"
    assert observed.error == (
        "streams is 'wait', but a pause keeps the streams that run: resume first, or update with 'keep' or "
        "'abort'"
    )
    assert trainer.set(3, streams="abort").error is None
    assert trainer.set(2, streams="wait").error is None, "there are none"


def test_streams_end_with_what_they_have(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, ENDLESS), submit(2, ENDLESS))
    run_some(trainer, 1, 2)
    trainer.set(2, streams="abort")
    assert trainer.received.finish == dict.fromkeys((1, 2), FinishReason.ABORT)
    assert set(trainer.versions(1)) == {1}
    trainer.peer.send(submit(3, 5))
    trainer.peer.read_ends(3)
    assert set(trainer.versions(3)) == {2}


def test_a_change_that_fails_changes_nothing(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, ENDLESS))
    observed = trainer.set(2, sources=[{"path": "/nowhere/file.safetensors"}])
    assert "/nowhere/file.safetensors cannot be read" in (observed.error or "")
    assert observed.result["version"] == "v1"
    run_some(trainer, 1)
    assert set(trainer.versions(1)) == {1}
    assert "Object missing required field" in (trainer.set(2, sources=[{}]).error or "")


@pytest.mark.parametrize(
    ("part", "message"),
    [({}, "no weights for version"), ({"part": True}, "the model has no parameter for other")],
)
def test_files_of_another_model_are_refused(
    trainer: Trainer, tmp_path: Path, part: dict[str, Any], message: str
) -> None:
    trainer.set(1)
    save_file({"other": np.array([2], np.uint8)}, tmp_path / "other.safetensors")
    observed = trainer.set(2, sources=[{"path": str(tmp_path / "other.safetensors"), **part}])
    assert (observed.error, observed.result["version"]) == (message, "v1")


def test_a_part_is_added_to_the_weights_before(trainer: Trainer) -> None:
    sources = [{"path": trainer.file(1)}, {"path": trainer.file(2), "part": True}]
    assert trainer.set(3, sources=sources).error is None
    trainer.peer.send(submit(1, 5))
    trainer.peer.read_ends(1)
    assert set(trainer.versions(1)) == {2}


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipe_is_not_waited_for(trainer: Trainer, tmp_path: Path, inside: bool) -> None:
    trainer.set(1)
    pipe = tmp_path / "pipes" / "some.safetensors"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    observed = trainer.set(2, sources=[{"path": str(pipe.parent if inside else pipe)}])
    assert observed.error == f"{pipe} cannot be read: it is no regular file"
    assert observed.result["version"] == "v1"


def test_a_rollback_brings_the_former_weights_back(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.set(2)
    trainer.peer.send(submit(1, ENDLESS))
    assert trainer.set(1, rollback=True).result["version"] == "v1"
    run_some(trainer, 1)
    assert trainer.versions(1)[-1] == 1
    assert trainer.set(0, rollback=True).result["version"] == "default"


def test_a_rollback_without_files_keeps_what_the_engine_has(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.set(2)
    gone = [{"path": "/nowhere/file.safetensors"}]
    observed = trainer.set(1, rollback=True, sources=gone)
    assert "cannot be read" in (observed.error or "")
    assert observed.result["version"] == "v2"


def test_a_rollback_to_what_it_has_needs_no_files(trainer: Trainer, tmp_path: Path) -> None:
    trainer.set(1)
    (tmp_path / "1.safetensors").unlink()
    trainer.generation += 1
    value = {"version": "v1", "sources": [{"path": str(tmp_path / "1.safetensors")}]}
    state = DesiredState(WEIGHTS, trainer.generation, value, rollback=True)
    trainer.peer.send(ApplyStates([state]))
    observed = trainer.wait()
    assert observed.error is None
    assert observed.result["generation"] == trainer.generation


def test_ranks_in_lock_step_hold_first(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, ENDLESS))
    run_some(trainer, 1)
    assert trainer.set(2, hold=True).result["version"] == "v1"
    count = len(trainer.received.tokens[1])
    trainer.peer.send(submit(2, 5))
    assert trainer.peer.call("weights_checksum").error is None
    assert len(trainer.received.tokens[1]) == count
    assert trainer.set(2).result["version"] == "v2"
    trainer.peer.read_ends(2)
    assert set(trainer.versions(2)) == {2}


def test_a_hold_that_is_rolled_back(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, ENDLESS))
    trainer.set(2, hold=True)
    assert trainer.set(1, rollback=True).error is None
    run_some(trainer, 1)
    assert set(trainer.versions(1)) == {1}


def test_a_change_that_another_takes_the_place_of(trainer: Trainer) -> None:
    trainer.set(1)
    trainer.peer.send(submit(1, ENDLESS))
    run_some(trainer, 1)
    trainer.ask(2, streams="wait")
    trainer.peer.send(submit(2, 5))
    trainer.set(1, rollback=True)
    trainer.peer.read_ends(2)
    assert set(trainer.versions(2)) == {1}


def test_checksums_are_of_the_weights(trainer: Trainer) -> None:
    sums = [trainer.peer.call("weights_checksum").result]
    for version in (1, 2, 1):
        trainer.set(version)
        sums.append(trainer.peer.call("weights_checksum").result)
    assert sums[1] == sums[3]
    assert len(set(sums)) == 3


def test_an_engine_that_cannot(host: Start, connect: Connect, tmp_path: Path, model_dir: Path) -> None:
    served = host()
    assert isinstance(served.engine, SyntheticEngine)
    served.engine.weights = None  # type: ignore[assignment]
    trainer = Trainer(connect(), tmp_path, read_vocabulary(model_dir).ordinary)
    assert trainer.set(1).error == "this engine cannot replace its weights while it runs"
    assert trainer.set(0).error is None
    error = trainer.peer.call("weights_checksum").error
    assert error == "this engine cannot tell the checksum of its weights"


def test_an_engine_whose_weights_are_lost_ends(engine: Host, trainer: Trainer, monkeypatch: Any) -> None:
    trainer.peer.send(submit(1, ENDLESS))
    run_some(trainer, 1)

    def load(plan: WeightPlan, **options: Any) -> int:
        raise BrokenWeights("half of them are copied")

    monkeypatch.setattr(engine.engine.weights, "load", load)
    trainer.ask(1)
    trainer.peer.read(lambda: GoAway("it failed") in trainer.received.others)
    engine.join()
    assert isinstance(engine.error, BrokenWeights)


def test_streams_run_while_files_are_opened(
    engine: Host, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = engine.engine.weights
    assert loader is not None
    plan, may_open = loader.plan, threading.Event()

    def wait_and_plan(sources: Sequence[WeightSource]) -> WeightPlan:
        may_open.wait(DEADLINE_S)
        return plan(sources)

    monkeypatch.setattr(loader, "plan", wait_and_plan)
    trainer.peer.send(submit(1, ENDLESS))
    trainer.ask(1)
    run_some(trainer, 1, more=50)
    assert trainer.observed() is None
    may_open.set()
    assert trainer.wait().error is None
    run_some(trainer, 1)
    assert trainer.versions(1)[-1] == 1
