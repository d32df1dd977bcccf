"""Copies between host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.torch import transfer
from penstock.engine.torch.transfer import ALIGNMENT, to_device_together

ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(5),
    np.array([True, False, True]),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros(0, np.int64),
    np.linspace(0, 1, 7),
    np.array([1.5], np.float32),
    np.arange(12).reshape(3, 4)[:, 1:3],
    np.arange(33, dtype=np.uint8),
]


@pytest.mark.parametrize("chosen", [ARRAYS, ARRAYS[:1], ARRAYS[3:4], []])
def test_arrays_that_are_copied_together(
    chosen: list[np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []

    def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        copies.append(torch.from_numpy(array.copy()))
        return copies[-1]

    monkeypatch.setattr(transfer, "to_device", to_device)
    tensors = to_device_together(chosen, torch.device("cuda"))
    assert len(copies) == 1
    for array, tensor in zip(chosen, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.is_contiguous()
        assert (tensor.data_ptr() - copies[0].data_ptr()) % ALIGNMENT == 0
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_on_a_cpu_nothing_is_copied() -> None:
    tensors = to_device_together(ARRAYS, torch.device("cpu"))
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert np.shares_memory(tensor.numpy(), array) == bool(array.size)
