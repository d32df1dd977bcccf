"""The stages: what runs, in the order of what it teaches, and the time that each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stage:
    """One child process; several may have the same letter.

    ``arguments``: of the Python interpreter. ``seconds``: its time where all stages have 9 minutes together;
    a stage that needs less leaves the rest to the later ones, in these proportions. ``gib``: of the device's
    memory that it needs at least. ``needs``: modules, beside Penstock's own.
    """

    letter: str
    name: str
    seconds: float
    arguments: tuple[str, ...]
    gib: float = 0.0
    needs: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is its letter, or a longer part of its name."""
        return name == self.letter or (len(name) > 1 and name in self.name)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"scripts.gpu.{name}", *arguments)


TESTS = ("pytest", "pytest_timeout", "xdist", "hypothesis")
STAGES = (
    Stage("a", "tests of the torch engine", 90, _module("checks", "engine"), 0, TESTS),
    Stage("b", "greedy equality with transformers", 60, _module("checks", "families"), 0, TESTS),
    Stage("c", "serve: opt-125m", 50, _module("serving", "opt-125m", "streams"), 4),
    Stage("c", "serve: llama-8b", 85, _module("serving", "llama-8b", "streams"), 20),
    Stage("c", "steps: opt-125m", 40, _module("steps", "opt-125m"), 8),
    Stage("c", "steps: llama-8b", 80, _module("steps", "llama-8b"), 22),
    Stage("d", "roofline", 20, _module("roofline")),
    Stage("e", "transformers: llama-8b", 30, _module("beside", "llama-8b"), 20),
    Stage("e", "transformers: opt-125m", 20, _module("beside", "opt-125m"), 4),
    Stage("f", "seeds: opt-125m", 60, _module("serving", "opt-125m", "seeds"), 4),
)


def rehearsed(stages: Sequence[Stage]) -> list[Stage]:
    """The same stages with tiny shapes: most of their time is that of imports, which all have."""
    return [replace(stage, seconds=1.0, gib=0.0) for stage in stages]


def limit(left: float, stages: Sequence[Stage]) -> float:
    """Seconds of the first of the ``stages`` that remain, when ``left`` seconds do."""
    return max(0.0, left) * stages[0].seconds / sum(stage.seconds for stage in stages)
