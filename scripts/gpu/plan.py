"""The stages: what runs, in the order of what it teaches, and the time that each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stage:
    """One child process; several may have the same letter.

    ``arguments``: of the Python interpreter. ``seconds``: its time where all stages have 9 minutes together;
    a stage that needs less leaves the rest to the later ones, in these proportions.
    """

    letter: str
    name: str
    seconds: float
    arguments: tuple[str, ...]

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is its letter, or a longer part of its name."""
        return name == self.letter or (len(name) > 1 and name in self.name)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"scripts.gpu.{name}", *arguments)


STAGES = (
    Stage("a", "tests of the torch engine", 90, _module("checks", "engine")),
    Stage("b", "greedy equality with transformers", 60, _module("checks", "families")),
    Stage("c", "serve: opt-125m", 50, _module("serving", "opt-125m", "streams")),
    Stage("c", "serve: llama-8b", 85, _module("serving", "llama-8b", "streams")),
    Stage("c", "steps: opt-125m", 40, _module("steps", "opt-125m")),
    Stage("c", "steps: llama-8b", 80, _module("steps", "llama-8b")),
    Stage("d", "roofline", 20, _module("roofline")),
    Stage("e", "transformers' continuous batching", 45, _module("beside")),
    Stage("f", "seeds: opt-125m", 60, _module("serving", "opt-125m", "seeds")),
)


def rehearsed(stages: Sequence[Stage]) -> list[Stage]:
    """The same stages with tiny shapes: most of their time is that of imports, which all have."""
    return [replace(stage, seconds=1.0) for stage in stages]


def limit(left: float, stages: Sequence[Stage]) -> float:
    """Seconds of the first of the ``stages`` that remain, when ``left`` seconds do."""
    return max(0.0, left) * stages[0].seconds / sum(stage.seconds for stage in stages)
