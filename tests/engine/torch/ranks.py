"""Ranks as processes, each with an engine that has a share of the experts; they step together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.config.serve import ServeConfig
from penstock.engine.torch.engine import TorchEngine
from penstock.wire.messages import Submit
from penstock.wire.sockets import ProcessGroupSpec
from penstock.wire.weights.desired import WeightSource
from tests.engine.torch.adapters import load
from tests.engine.torch.harness import SMALL_ENGINE, Driver, Outcome

PATIENCE_S = 300.0


@dataclass
class Plan:
    """What one rank is asked, by the step before which it comes."""

    requests: dict[int, list[Submit]] = field(default_factory=dict)
    aborts: dict[int, list[int]] = field(default_factory=dict)
    adapters: dict[str, Path] = field(default_factory=dict)
    """Loaded before the first step."""
    weights: list[WeightSource] = field(default_factory=list)
    """Copied before the first step, by all ranks together."""


@dataclass
class Told:
    """What came of it."""

    outcomes: dict[int, Outcome]
    idle_steps: int
    metrics: dict[str, float]
    experts: list[tuple[int, ...]]
    """Shapes of the tensors of experts."""


class Ranks:
    """Processes that live for several groups, one after the other, as starting them takes seconds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._groups = 0
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=serve, args=(theirs, rank, size), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def run(self, directory: Path, plans: Sequence[Plan], steps: int, **options: Any) -> list[Told]:
        """Every rank makes ``steps`` steps, idle ones where it has no work."""
        answers = self._ask(directory, plans, steps, options)
        assert all(isinstance(answer, Told) for answer in answers), answers
        return answers

    def refusals(self, directory: Path, **options: Any) -> list[str]:
        """How each rank refuses to start."""
        return self._ask(directory, [Plan()] * self.size, 0, options)

    def _ask(self, directory: Path, plans: Sequence[Plan], steps: int, options: dict[str, Any]) -> list[Any]:
        rendezvous = str(directory / f"rendezvous-{self._groups}")
        self._groups += 1
        for pipe, plan in zip(self._pipes, plans, strict=True):
            pipe.send((str(directory), rendezvous, plan, steps, SMALL_ENGINE | options))
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE_S), f"rank {rank} says nothing"
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def serve(pipe: Connection, rank: int, size: int) -> None:
    """The life of a rank's process."""
    while True:
        directory, rendezvous, plan, steps, options = pipe.recv()
        try:
            pipe.send(_run(directory, ProcessGroupSpec(rank, size, rendezvous), plan, steps, options))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            pipe.send(f"{type(error).__name__}: {error}")


def _run(directory: str, group: ProcessGroupSpec, plan: Plan, steps: int, options: dict[str, Any]) -> Told:
    engine = TorchEngine(ServeConfig(**options), directory, lambda text, fraction: None, group=group)
    if plan.adapters:
        load(engine, plan.adapters)
    if plan.weights:
        copied = engine.weights.plan(plan.weights)
        engine.weights.load(copied, drop_cache=True, in_step=True, tick=lambda: None)
    driver, idle_steps = Driver(engine), 0
    for step in range(steps):
        for request in plan.requests.get(step, ()):
            driver.submit(request)
        engine.abort(0, plan.aborts.get(step, ()))
        if engine.has_work():
            driver.step()
        else:
            engine.dummy_step()
            idle_steps += 1
    assert not engine.has_work(), "streams still run"
    model = engine._runner._model._model
    experts = [tuple(value.shape) for name, value in model.named_parameters() if ".experts." in name]
    told = Told(driver.outcomes, idle_steps, engine.metrics(), experts)
    engine.close()
    return told
