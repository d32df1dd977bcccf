"""What an API server asks of an engine that makes vectors, scores or labels of texts."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from penstock.wire.arrays import I32

MAX_LABELS = 1 << 20
"""More than any classifier has."""
MAX_STREAM_INPUTS = 1 << 16
"""Inputs of one stream."""


class PoolingTask(IntEnum):
    """What is made of an input."""

    EMBED = 0
    """One vector."""
    TOKEN_EMBED = 1
    """A vector for each token."""
    CLASSIFY = 2
    """A number for each label; a cross-encoder's score is that of its only label."""
    TOKEN_CLASSIFY = 3
    """A number for each token and label."""


TASK_NAMES = {task: task.name.lower() for task in PoolingTask}
"""As vLLM calls them: embed, token_embed, classify, token_classify."""
PER_TOKEN = (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)

_Columns: TypeAlias = Annotated[bytes, Meta(max_length=4 * MAX_STREAM_INPUTS)]


class PoolingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is made of a stream's inputs, whose token ids follow each other in Submit.prompt."""

    task: Annotated[int, Meta(ge=0, le=int(max(PoolingTask)))]
    """A :class:`PoolingTask`."""
    lengths: _Columns
    """int32 little-endian [inputs]: tokens of each input, at least one."""
    dimensions: Annotated[int, Meta(ge=0, lt=1 << 24)] = 0
    """How many values of each vector are wanted, the first ones; 0: all."""
    normalize: bool = True
    """Whether vectors have the length 1, after they are cut to ``dimensions``."""
    activate: bool = True
    """Whether the numbers of labels are probabilities (as the model's configuration makes them: sigmoid or
    softmax), not logits."""
    seconds: _Columns = b""
    """int32 little-endian [inputs]: index of the first token of an input's second text, to which the model
    gives another token type; 0: the input is no pair. Empty: none is."""
    skipped: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """Tokens at the start of each input, those of a prompt, that its vector is not pooled from."""

    def columns(self) -> tuple[I32, I32]:
        """``lengths`` and ``seconds`` as arrays, int32[inputs]."""
        import numpy as np  # the supervisor, which knows the tasks, does without

        lengths = np.frombuffer(self.lengths, "<i4")
        return lengths, np.frombuffer(self.seconds, "<i4") if self.seconds else np.zeros_like(lengths)


def columns_fault(params: PoolingParams, prompt: bytes, inputs: int) -> str:
    """Why the columns do not fit a prompt of so many ``inputs``; empty: they do."""
    if len(params.lengths) != 4 * inputs or not inputs:
        return f"lengths has {len(params.lengths)} bytes, not 4 for each of {inputs} inputs"
    if params.seconds and len(params.seconds) != len(params.lengths):
        return f"seconds has {len(params.seconds)} bytes, not {len(params.lengths)}"
    lengths, seconds = params.columns()
    if lengths.min() < 1 or 4 * int(lengths.sum()) != len(prompt):
        return f"lengths do not add up to a prompt of {len(prompt)} bytes"
    if seconds.min() < 0 or (lengths - seconds).min() < 1:
        return "seconds is not within the inputs"
    return ""


class PoolingInfo(msgspec.Struct, array_like=True, frozen=True):
    """What an engine makes besides text."""

    tasks: tuple[Annotated[int, Meta(ge=0, le=int(max(PoolingTask)))], ...]
    width: Annotated[int, Meta(ge=0, lt=1 << 24)] = 0
    """Values of a whole vector; 0: it makes none."""
    labels: Annotated[int, Meta(ge=0, le=MAX_LABELS)] = 0
    """Labels of its classifier; 0: it has none."""
    generates: bool = False
    """Whether the engine serves text as well."""
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """Tokens of the longest input; 0: as many as of a text."""

    @property
    def names(self) -> tuple[str, ...]:
        """vLLM's names of all that it makes."""
        return ("generate",) * self.generates + tuple(TASK_NAMES[PoolingTask(task)] for task in self.tasks)
