"""Makes vLLM's PoolingParams, which are positional on the wire, as its own front end would.

The places are those of all supported versions: use_activation, dimensions, step_tag_id, returned_token_ids,
task, requires_token_ids, skip_reading_prefix_cache, late_interaction_params, extra_kwargs.
"""

from __future__ import annotations

from typing import Any

from penstock.wire.pooling import PER_TOKEN, TASK_NAMES, PoolingParams, PoolingTask

EMBEDS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


def pooling_params(params: PoolingParams, *, type_ranges: bool) -> list[Any]:
    """For a request of one input. ``type_ranges``: whether the version wants to know where the second text of
    a pair ends (:func:`penstock.engine.attach.versions.takes_type_ranges`)."""
    task = PoolingTask(params.task)
    (length,), (second,) = (column.tolist() for column in params.columns())
    extra: dict[str, Any] | None = None
    if second:
        extra = {"compressed_token_type_ids": [second, length] if type_ranges else second}
    return [
        params.normalize if task in EMBEDS else params.activate,
        params.dimensions or None if task in EMBEDS else None,
        None,
        None,
        TASK_NAMES[task],
        False,
        task in PER_TOKEN,  # what a prefix cache has of a prompt would be missing among its vectors
        None,
        extra,
    ]
