"""The output projection against a plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.engine.torch.lm_head import CPU_ROWS, LMHead
from tests.engine.torch.harness import DEVICE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 63, CPU_ROWS])
def test_any_number_of_rows_gives_the_logits_of_the_projection(
    bias: bool, dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(rows)
    projection = nn.Linear(24, 77, bias=bias, dtype=dtype, device=DEVICE)
    hidden = torch.randn(rows, 24, dtype=dtype).to(DEVICE)
    with torch.inference_mode():
        logits = LMHead(projection, 1.0, None, DEVICE)(hidden)
        expected = projection(hidden).float()
    assert logits.dtype == torch.float32
    # in float32 oneDNN and the BLAS add up in different orders, in bfloat16 both are the same operator
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (0.0, 0.0)
    torch.testing.assert_close(logits, expected, rtol=rtol, atol=atol)


def test_logits_are_scaled_then_capped() -> None:
    torch.manual_seed(0)
    projection = nn.Linear(8, 30, device=DEVICE)
    hidden = 50 * torch.randn(3, 8, device=DEVICE)
    with torch.inference_mode():
        logits = LMHead(projection, 0.5, 5.0, DEVICE)(hidden)
        assert logits.abs().max() <= 5
        torch.testing.assert_close(logits, 5 * torch.tanh(projection(hidden) / 10))
