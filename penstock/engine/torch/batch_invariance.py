"""``--batch-invariant``: a row's logits have the same bits whatever is computed beside it, on a CPU.

On a CPU a row depends on the others in three ways only, which were found by comparing bits:

- A matrix product chooses its order of additions by the number of rows: MKL has one for a single row, one for
  two or three and one for more, oneDNN one for a single row and one for more. Rows are padded to a multiple
  that leaves a single order.
- A product over the positions of a history is cut into blocks whose size depends on its length. Here blocks
  have a fixed size, and padding adds zeros.
- Elementwise functions compute what a vector does not fill, at the end of a thread's part of a tensor, with
  other instructions: SiLU then differs in 4 of 100 elements, GELU in 60. Rows are padded to whole vectors,
  and activation functions are computed in pieces that no thread divides.

None of this is documented, and other processors may behave differently: it is tested when a model is loaded,
with its own layers, and refused where it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from penstock.config.errors import ConfigError

CANDIDATES = 1, 4, 8, 16
"""Multiples of rows that are tried, the cheapest first: in half precision without AVX-512 any number of rows
does, in float32 4 or more."""
PROBED = 192
"""Rows of a layer's test, of which smaller numbers are computed again."""
BLOCK = 128
"""Summands of a product that are added up at once. One pass of MKL's kernels takes up to 192."""
QUANTUM = 16
"""The positions of a part are a multiple of it (--block-size is one): fewer than a vector holds are summed in
another order, and a product of less than 400 multiplications is computed by PyTorch itself."""
VECTOR = 64
"""Elements of two AVX-512 registers of 16-bit numbers, the most that a vectorised loop takes at once."""
PIECE = 1 << 14
"""Elements of an activation function that PyTorch computes in one thread."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_REFUSAL = "--batch-invariant: "


def refuse_device(device: torch.device) -> None:
    """Raises ConfigError for a device whose products nobody has compared."""
    if device.type != "cpu":
        raise ConfigError(f"{_REFUSAL}it holds on a CPU only; on a GPU other kernels add in other orders")


def make_invariant(model: Any) -> int:
    """Make a transformers model's layers independent of the number of rows, if that is a multiple of the
    result. Raises ConfigError when its layers, or the machine, do not allow it."""
    if any(path.endswith(".experts") for path, _ in model.named_modules()):
        raise ConfigError(
            f"{_REFUSAL}a mixture of experts computes as many rows at once as a batch brings it"
        )
    if torch.get_num_threads() > 1:
        for module in model.modules():
            if type(module).__module__ in _ACTIVATIONS:
                _divide(module)
    layers = {_kind(layer): layer for layer in _projections(model)}
    widths = [_width(layer)[1] for layer in layers.values()]
    rows = [max(1, VECTOR // math.gcd(VECTOR, *widths))]
    rows += [_steady_rows(layer, *_probe(layer)) for layer in layers.values()]
    return max(rows)


def steady_product(first: Tensor, second: Tensor, rows: int) -> Tensor:
    """bmm of [P, R, K] and [P, K, N], the same bits for a row whatever R is, and with zeros behind K."""
    count = first.shape[1]
    if count % rows:
        first = pad(first, (0, 0, 0, -count % rows))
    total = torch.bmm(first[..., :BLOCK], second[:, :BLOCK])
    for at in range(BLOCK, first.shape[2], BLOCK):
        total.baddbmm_(first[..., at : at + BLOCK], second[:, at : at + BLOCK])
    return total[:, :count]


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Attention of query [P, G, C, D] with key and value [P, L, D], where visible [P, 1, C, L], for a multiple of
rows."""


def attention_rows(attend: Attend, heads: int, size: int, dtype: torch.dtype) -> int:
    """The smallest multiple of rows with which attention gives a token the same bits alone, among others and
    with a longer padding. ``heads``: that share a KV head. Raises ConfigError when there is none."""
    generator = torch.Generator().manual_seed(0)
    longest, width = 5 * BLOCK, 11
    query = torch.randn((3, heads, width, size), generator=generator).to(dtype)
    key, value = (torch.randn((3, longest, size), generator=generator).to(dtype) for _ in range(2))

    def steady(rows: int) -> bool:
        for length in (1, 15, 60, BLOCK + 9, 2 * BLOCK + 30, 4 * BLOCK):
            seen = (torch.arange(longest) <= length + torch.arange(width)[:, None]).expand(3, 1, -1, -1)
            whole = attend(query, key, value, seen, rows)
            for pairs, first, last in ((1, 0, 1), (1, 4, 5), (2, 0, 3), (3, 2, 10)):
                used = length + last  # no position behind the last query's is seen
                used += -used % QUANTUM
                for padded in (used, used + QUANTUM, min(longest, used + BLOCK)):
                    found = attend(
                        query[:pairs, :, first:last],
                        key[:pairs, :padded],
                        value[:pairs, :padded],
                        seen[:pairs, :, first:last, :padded],
                        rows,
                    )
                    if not torch.equal(found, whole[:pairs, :, first:last]):
                        return False
        return True

    return _smallest(steady, "attention")


def head_rows(make: Callable[[int], Callable[[Tensor], Tensor]], width: int, dtype: torch.dtype) -> int:
    """The smallest number of rows to which an LM head has to pad. ``make``: the head for a number of rows."""
    values = torch.randn((64, width), generator=torch.Generator().manual_seed(0)).to(dtype)

    def steady(rows: int) -> bool:
        head = make(rows)
        whole = head(values)
        return all(torch.equal(head(values[:count]), whole[:count]) for count in (1, 2, 3, 5, 9, 17, 40))

    return _smallest(steady, "the output projection")


def _steady_rows(layer: Callable[[Tensor], Tensor], what: str, values: Tensor) -> int:
    whole = layer(values)

    def steady(rows: int) -> bool:
        counts = {rows * times for times in (1, 2, 3, 5, 7)} | {64, 128}
        return all(torch.equal(layer(values[:count]), whole[:count]) for count in sorted(counts))

    return _smallest(steady, what)


def _smallest(steady: Callable[[int], bool], what: str) -> int:
    with torch.inference_mode():
        for rows in CANDIDATES:
            if steady(rows):
                return rows
    raise ConfigError(
        f"{_REFUSAL}on this machine {what} gives a row other bits when other rows are computed beside it"
    )


def _projections(model: Any) -> Iterator[Any]:
    from transformers.pytorch_utils import Conv1D

    for module in model.base_model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield module


def _width(layer: Any) -> tuple[int, int]:
    """Input and output features. The weight of GPT-2's Conv1D is [in, out], that of nn.Linear [out, in]."""
    first, second = layer.weight.shape
    return (second, first) if isinstance(layer, nn.Linear) else (first, second)


def _kind(layer: Any) -> tuple[Any, ...]:
    return type(layer), _width(layer), layer.bias is None


def _probe(layer: Any) -> tuple[str, Tensor]:
    width, out = _width(layer)
    values = torch.randn((PROBED, width), generator=torch.Generator().manual_seed(0))
    return f"a layer of {width} x {out}", values.to(layer.weight.dtype)


def _divide(module: Any) -> None:
    """Compute an activation function in pieces that no two threads share."""
    original: Callable[[Tensor], Tensor] = module.forward

    def forward(values: Tensor) -> Tensor:
        if values.numel() <= PIECE:
            return original(values)
        pieces = torch.split(values.reshape(-1), PIECE)
        return torch.cat([original(piece) for piece in pieces]).view(values.shape)

    module.forward = forward
