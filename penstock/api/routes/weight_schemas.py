"""The body of ``POST /update_weights``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.weights import MAX_SOURCES, CacheMode, StreamsMode, WeightVersion


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """POST /update_weights."""

    weight_version: Annotated[
        WeightVersion, Meta(description="Name of the weights, 1 to 64 printable ASCII characters.")
    ]
    path: Annotated[
        str | None,
        Meta(
            description="Absolute path of a directory with safetensors files, or of one such file, the same "
            "on every host; also below /dev/shm."
        ),
    ] = None
    paths: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=MAX_SOURCES)] | None,
        Meta(description="Several of them, in place of path."),
    ] = None
    tensors: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        Meta(description="Names of the tensors to take from path; absent: all that are there."),
    ] = None
    whole: Annotated[
        bool | None,
        Meta(
            description="Whether the model is replaced as a whole, otherwise the tensors that there are; by "
            "default it is, unless tensors are named."
        ),
    ] = None
    streams: Annotated[
        StreamsMode,
        Meta(
            description="What becomes of streams that run: keep has them go on with the new weights, wait "
            "finish first, abort ends them with what they have."
        ),
    ] = "keep"
    cache: Annotated[
        CacheMode,
        Meta(
            description="drop: the prefix cache is emptied, and streams that go on compute their KV cache "
            "again; keep: both are used as they are."
        ),
    ] = "drop"
