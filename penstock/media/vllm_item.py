"""The arrays of a picture that vLLM's processor has prepared: vLLM's message of it, and its place.

An engine process passes the message on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_RAW_VIEW = 3
"""vLLM's extension type of an array's bytes."""


class VllmItem(msgspec.Struct, frozen=True):
    """One picture, as vLLM's engines want to know it."""

    modality: str
    offset: int
    """Of vLLM's range, in the tokens of the picture."""
    length: int
    embeds: msgspec.Raw | None
    """vLLM's message of bool[length], the tokens that get features; None: all."""
    data: memoryview
    """vLLM's message of a MultiModalKwargsItem."""


def item_arrays(
    modality: str, offset: int, length: int, embeds: NDArray[np.bool_] | None, data: bytes
) -> dict[str, NDArray[Any]]:
    """The arrays of a picture's pages. ``embeds``: bool[length] of the tokens that get features; None: all;
    ``data``: vLLM's message."""
    arrays: dict[str, NDArray[Any]] = {
        "modality": np.frombuffer(modality.encode(), np.uint8),
        "range": np.array((offset, length), np.int64),
        "item": np.frombuffer(data, np.uint8),
    }
    if embeds is not None:
        arrays["embeds"] = embeds
    return arrays


def read_item(arrays: Mapping[str, NDArray[Any]]) -> VllmItem:
    """The picture in the arrays of its pages. Raises ValueError for pages that vLLM's processor has not
    made."""
    try:
        offset, length = arrays["range"].tolist()
        mask = arrays.get("embeds")
        embeds = None
        if mask is not None:
            mask = mask.astype(np.bool_).reshape(length)
            view = msgspec.msgpack.Ext(_RAW_VIEW, mask.tobytes())
            embeds = msgspec.Raw(msgspec.msgpack.encode(("bool", mask.shape, view)))
        return VllmItem(arrays["modality"].tobytes().decode(), offset, length, embeds, arrays["item"].data)
    except (KeyError, ValueError) as error:
        raise ValueError(f"no pages of vLLM's processor: {error}") from None
