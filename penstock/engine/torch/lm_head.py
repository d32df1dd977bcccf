"""The LM head: projects hidden states to logits, a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

CPU_ROWS = 64
"""Rows per call on a CPU. 64 rows of a vocabulary of 16,384 are 4 MB, which stay in the CPU cache until they
are sampled: 11 ms for 1,024 rows on one core, against 65 ms for all logits at once."""
DEVICE_LOGITS = 1 << 26
"""Logits per call on other devices: 256 MiB in float32. Top-p over the whole vocabulary takes some ten times
that for its sort and sums, which the KV cache must leave free."""


class LMHead:
    """The output projection, for up to ``rows`` rows per call."""

    def __init__(
        self,
        projection: nn.Linear,
        scale: float,
        softcap: float | None,
        device: torch.device,
        fewest: int | None = None,
    ) -> None:
        """Logits are multiplied by ``scale``; ``softcap`` bounds them by a tanh. ``fewest``:
        a power of two; rows are padded to it, and to a power of two above it. None: as is fastest."""
        self._fewest = 1 if fewest is None else fewest
        self._weight = projection.weight
        self._bias = projection.bias
        self._scale = scale
        self._softcap = softcap
        by_onednn = device.type == "cpu" and self._weight.dtype == torch.float32
        self._fixed = by_onednn or fewest is not None
        self._linear = _onednn_linear() if by_onednn else linear
        self.rows = CPU_ROWS if device.type == "cpu" else max(1, DEVICE_LOGITS // len(self._weight))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] → float32[S, V], for S up to ``rows``."""
        count = len(hidden)
        # oneDNN compiles a kernel per shape, which takes milliseconds: use few shapes
        rows = max(_power_of_two(count), self._fewest) if self._fixed else count
        if rows > count:
            hidden = pad(hidden, (0, 0, 0, rows - count))
        logits = self._linear(hidden, self._weight, self._bias)[:count].float()
        if self._scale != 1:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()


def _onednn_linear() -> Linear:
    """oneDNN's linear, which uses AVX-512 on every processor that has it; the BLAS behind PyTorch's float32
    linear does not (10 ms against 24 for 1,024 x 64 x 16,384). PyTorch's compiler calls the same operator."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return linear
    operator = torch.ops.mkldnn._linear_pointwise

    def onednn(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected: Tensor = operator(hidden, weight, bias, "none", [], "")
        return projected

    return onednn
