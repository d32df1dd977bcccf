"""What an API server asks of an engine that makes vectors, scores or labels of texts."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

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

    task: Annotated[int, Meta(ge=0, le=max(PoolingTask))]
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


class PoolingInfo(msgspec.Struct, array_like=True, frozen=True):
    """What an engine makes besides text."""

    tasks: tuple[Annotated[int, Meta(ge=0, le=max(PoolingTask))], ...]
    width: Annotated[int, Meta(ge=0, lt=1 << 24)] = 0
    """Values of a whole vector; 0: it makes none."""
    labels: Annotated[int, Meta(ge=0, le=MAX_LABELS)] = 0
    """Labels of its classifier; 0: it has none."""
    generates: bool = False
    """Whether the engine serves text as well."""
