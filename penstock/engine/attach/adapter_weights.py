"""The values of an adapter's weights, and the check that vLLM can run with them."""

from __future__ import annotations

import numpy as np

from penstock.adapters.adapter_files import ReadAdapter
from penstock.adapters.errors import AdapterError
from penstock.adapters.safetensors_header import TensorView
from penstock.wire.arrays import F32

MAX_NORM = 1e4
"""Largest norm of a layer's A, and of its B after scaling: trained ones have at most a few hundred. With all
layers at the bound, hidden states stay within float32 and bfloat16; float16 holds no more than 65,504."""


def values(data: bytearray, view: TensorView) -> F32:
    """The elements of a tensor in ``data``, float32[n], which holds all that the file's dtypes do."""
    part = memoryview(data)[view.start : view.end]
    if view.dtype == "BF16":
        return (np.frombuffer(part, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(part, {"F16": "<f2", "F32": "<f4"}[view.dtype]).astype("<f4", copy=False)


def check_weights(adapter: ReadAdapter, largest: float) -> None:
    """Raises AdapterError for a weight that is not a number, or larger than ``largest``, the largest value of
    vLLM's dtype, also after scaling.

    vLLM would store it as infinity or NaN, and so would keys and values of its streams be in the KV cache,
    where another stream's attention may multiply what is left of them by zero, which is NaN. So it would be
    with weights that are finite and let hidden states overflow, hence MAX_NORM.
    """
    for layer, pair in adapter.files.modules.items():
        for matrix, view, factor in (("A", pair.a, 1.0), ("B", pair.b, max(1.0, abs(pair.scaling)))):
            found = values(adapter.data, view)
            largest_found = factor * max(float(found.max()), -float(found.min()))
            if not largest_found <= largest:  # NaN is not, either
                raise AdapterError(
                    f"layer {layer}: lora_{matrix} has the value {largest_found:.6g} after scaling; weights "
                    f"must be finite and at most {largest:.6g}"
                )
            norm = factor * float(np.linalg.norm(found.astype(np.float64)))
            if norm > MAX_NORM:
                raise AdapterError(
                    f"layer {layer}: lora_{matrix} has the norm {norm:.6g} after scaling; at most "
                    f"{MAX_NORM:g} is run, so that hidden states do not overflow"
                )
