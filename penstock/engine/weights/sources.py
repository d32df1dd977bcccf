"""Which files turn the weights that an engine has into the desired ones."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.wire.weights.desired import WeightSource


def sources_to_read(
    present: Sequence[WeightSource] | None, wanted: Sequence[WeightSource], start: WeightSource | None
) -> list[WeightSource]:
    """The sources to read, in this order.

    ``start``: the weights that the model was started with; None: they cannot be read again. ``present``: what
    made the present weights upon them; None: nothing can be built upon these. Raises ValueError if the start
    would have to be read and cannot be.
    """
    if present is not None and len(wanted) > len(present) and list(wanted[: len(present)]) == list(present):
        added = list(wanted[len(present) :])
        if all(source.is_part for source in added):
            return added
    if wanted and not wanted[0].is_part:
        return list(wanted)
    if start is None:
        raise ValueError(
            "the weights that the model was started with are needed and cannot be read again: they are in no "
            "safetensors file, or quantized in it; send a whole update"
        )
    return [start, *wanted]
