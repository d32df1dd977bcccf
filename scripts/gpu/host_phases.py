"""Where the host's time goes within steps: methods of the engine are timed while a block runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_runner import ModelRunner, PendingOutput

PHASES: dict[str, tuple[type, str]] = {
    "schedule": (Scheduler, "schedule"),
    "sampling data": (SamplingMetadata, "prepare"),
    "inputs": (ModelRunner, "_inputs"),
    "forward": (PagedModel, "run"),
    "sample": (ModelRunner, "_sample"),
    "read": (PendingOutput, "read_tokens"),
    "settle": (Scheduler, "update_from_output"),
}
"""Methods that a step calls, none within another. On a GPU "forward" and "sample" are the launch of kernels
and the copies for them, "read" is mostly the wait for the device."""


@contextlib.contextmanager
def timed_phases() -> Iterator[dict[str, float]]:
    """Gives the seconds spent in each phase while the block runs. An engine of this process, one thread."""
    spent = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                spent[phase] += time.perf_counter() - began

        return call

    with contextlib.ExitStack() as undo:
        for phase, (owner, name) in PHASES.items():
            method = getattr(owner, name, None)
            if method is None:  # the other phases tell something all the same
                continue
            undo.callback(setattr, owner, name, method)
            setattr(owner, name, timed(phase, method))
        yield spent
