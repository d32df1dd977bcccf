"""The Triton kernel, in Triton's interpreter, against attention written out; needs Triton, but no GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.torch.attention_metadata import DecodeMetadata
from tests.engine.torch.test_attention import HEADS, KV_HEADS, decoded, eager

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
    from penstock.engine.torch.cuda.kernels import paged_decode

    torch.manual_seed(0)
    lengths = [1, block_size, 33, 140]
    blocks = -(-max(lengths) // block_size)
    keys, values = torch.randn(2, len(lengths) * blocks, KV_HEADS, block_size, size)
    table = torch.randperm(len(lengths) * blocks).view(len(lengths), blocks)
    arguments = (
        torch.randn(len(lengths), HEADS, size),
        keys,
        values,
        DecodeMetadata(table.int(), torch.tensor(lengths)),
        0.7 * size**-0.5,
        window,
        softcap,
        torch.rand(KV_HEADS, HEADS // KV_HEADS) if alibi else None,
    )
    torch.testing.assert_close(paged_decode(*arguments), decoded(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_half_precision_rounds_scores_like_eager_attention(dtype: torch.dtype, softcap: float | None) -> None:
    """The rounding of wide scores is most of eager attention's error, and the kernel has the same."""
    from penstock.engine.torch.cuda.kernels import paged_decode

    torch.manual_seed(0)
    dtype = torch.float16
    size, block_size, lengths = 64, 16, [40, 90, 140]
    keys, values = torch.randn(2, len(lengths) * 9, KV_HEADS, block_size, size).to(dtype)
    query = (torch.randn(len(lengths), HEADS, size) * 4).to(dtype)
    table = torch.randperm(len(lengths) * 9).view(len(lengths), 9).int()
    decodes = DecodeMetadata(table, torch.tensor(lengths))
    found = paged_decode(query, keys, values, decodes, 0.7, None, softcap, None).float()
    exact = decoded(query.float(), keys.float(), values.float(), decodes, 0.7, None, softcap, None)
    rounded = torch.cat(
        [_eager(query, keys, values, table, row, length, softcap) for row, length in enumerate(lengths)]
    )
    assert (found - rounded).abs().mean() < 0.5 * (exact - rounded).abs().mean()


def _eager(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    row: int,
    length: int,
    softcap: float | None,
) -> torch.Tensor:
    """float32[1, H, D] of one token's row."""
    known, given = (
        cache[table[row]].transpose(0, 1).flatten(1, 2)[None, :, :length] for cache in (keys, values)
    )
    history = torch.cat([known, given])
    return eager(query[row][:, None], history, length - 1, 0.7, softcap).float()
