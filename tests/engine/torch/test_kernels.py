"""The Triton kernel, in Triton's interpreter, against attention written out; needs Triton, but no GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.torch.attention_metadata import DecodeMetadata
from tests.engine.torch.test_attention import HEADS, KV_HEADS, decoded

pytest.importorskip("triton")


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize(
    ("window", "softcap", "alibi"),
    [(None, None, False), (20, None, False), (None, 3.0, False), (300, 3.0, True)],
)
@pytest.mark.parametrize("size", [8, 24, 64])
def test_decodes_are_what_they_have_to_be(
    block_size: int,
    window: int | None,
    softcap: float | None,
    alibi: bool,
    size: int,
) -> None:
    from penstock.engine.torch.kernels import paged_decode

    torch.manual_seed(0)
    lengths = [1, block_size, 33, 140]
    blocks = -(-max(lengths) // block_size)
    keys, values = torch.randn(2, len(lengths) * blocks, KV_HEADS, block_size, size)
    table = torch.randperm(len(lengths) * blocks).view(len(lengths), blocks)
    arguments = (
        torch.randn(len(lengths), HEADS, size),
        keys,
        values,
        DecodeMetadata(table, torch.tensor(lengths)),
        window,
        softcap,
        torch.rand(KV_HEADS, HEADS // KV_HEADS) if alibi else None,
    )
    torch.testing.assert_close(paged_decode(*arguments), decoded(*arguments), rtol=1e-4, atol=1e-5)
