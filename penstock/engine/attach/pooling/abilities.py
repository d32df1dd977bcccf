"""What an engine makes of texts, as it shows: its tasks, and the size of what it returns for each.

vLLM tells the names of its tasks alone. How many values a vector has depends on the model's files and on
arguments behind ``--`` (``--convert``, ``--pooler-config``, ``--hf-overrides``), so each task is tried once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import numpy as np

from penstock.engine.attach.arrays import UnreadableArray, read_array
from penstock.engine.attach.attached_core import AttachedCore, CallFailed
from penstock.engine.attach.pooling.requests import EMBEDS
from penstock.engine.attach.requests import encode_add
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.pooling import PER_TOKEN, TASK_NAMES, PoolingInfo, PoolingParams, PoolingTask

log = logging.getLogger(__name__)

TRIED_TOKENS = 3
"""Tokens of the text with which tasks are tried."""
WAIT_S = 1.0


def find_abilities(core: AttachedCore, on_wait: Callable[[], None]) -> PoolingInfo | None:
    """What the engine makes besides text; None: it makes text alone. ``on_wait`` is called once a second.
    Raises EngineLost."""
    try:
        names = core.call("get_supported_tasks", on_wait=on_wait)
    except CallFailed:
        return None
    named = names if isinstance(names, list) else []
    offered = [task for task, name in TASK_NAMES.items() if name in named]
    if not offered or "generate" in named:
        return None
    with contextlib.suppress(CallFailed):  # an earlier process may have paused it
        core.call("resume_scheduler", on_wait=on_wait)
    shapes = _try(core, offered, on_wait)
    embedding, labels = (_width(shapes, kinds) for kinds in (EMBEDS, _CLASSIFIES))
    tasks = [task for task in offered if _is_usable(task, shapes.get(task, ()), embedding, labels)]
    return PoolingInfo(tuple(tasks), embedding, labels)


_CLASSIFIES = (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)


def _width(shapes: dict[PoolingTask, tuple[int, ...]], kinds: tuple[PoolingTask, ...]) -> int:
    """Values of a vector of the first of ``kinds`` that has one; 0: none has."""
    return next((shapes[task][-1] for task in kinds if shapes.get(task)), 0)


def _is_usable(task: PoolingTask, shape: tuple[int, ...], embedding: int, labels: int) -> bool:
    width = embedding if task in EMBEDS else labels
    expected = (TRIED_TOKENS, width) if task in PER_TOKEN else (width,)
    if shape == expected and width:
        return True
    log.warning(
        "vLLM's task %s is not served: for a text of %d tokens it returns values of the shape %s, not %s",
        TASK_NAMES[task],
        TRIED_TOKENS,
        list(shape),
        list(expected),
    )
    return False


def _try(
    core: AttachedCore, tasks: list[PoolingTask], on_wait: Callable[[], None]
) -> dict[PoolingTask, tuple[int, ...]]:
    """The shape of what each task returns for a text, (values,) or (tokens, values); without those that
    fail. Raises EngineLost."""
    by_slot = dict(enumerate(tasks[: core.ids.slots]))
    for slot, task in by_slot.items():
        pooling = PoolingParams(task, np.int32(TRIED_TOKENS).tobytes())
        request = Submit(0, bytes(4 * TRIED_TOKENS), SamplingParams(max_tokens=1, seed=0), pooling=pooling)
        core.send(encode_add(core.ids.assign(slot), request, (), 1, type_ranges=core.takes_type_ranges))
    core.flush()
    shapes: dict[PoolingTask, tuple[int, ...]] = {}
    waiting, began = dict(by_slot), time.monotonic()
    while waiting:
        received = core.receive()
        if received is None:
            core.check_time(began, "made vectors of a text")
            on_wait()
            core.wait(WAIT_S)
            continue
        decoded, frames = received
        for entry, output in decoded.rare:
            task = waiting.pop(int(decoded.slots[entry]))
            with contextlib.suppress(UnreadableArray):
                shapes[task] = read_array(output.pooling_output, frames).shape
    for slot in by_slot:
        core.ids.forget(slot)
    return shapes
