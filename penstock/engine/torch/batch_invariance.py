"""``--batch-invariant``: a row's logits have the same bits whatever is computed beside it, on a CPU.

On a CPU a row depends on the others in three ways only, which were found by comparing bits:

- A matrix product chooses its order of additions by the number of rows: on AVX2 up to 4 rows have orders of
  their own, with AVX-512 and AMX also some numbers above 32. Layers compute blocks of few sizes, powers of
  two, all of which have been compared, and rows are padded to a multiple of the smallest one.
- A product over the positions of a history is cut into blocks whose size depends on its length. Here blocks
  have a fixed size, padding adds zeros, and half precision is computed in float32 and rounded once: units for
  16-bit numbers add in tiles, whose sizes depend on both.
- Elementwise functions compute what a vector does not fill, at the end of a thread's part of a tensor, with
  other instructions: SiLU then differs in 4 of 100 elements, GELU in 60. Rows are padded to whole vectors,
  and activation functions are computed in pieces that no thread divides.

None of this is documented, and other processors may behave differently: it is tested when a model is loaded,
with its own layers, and refused where it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from penstock.config.errors import ConfigError

CANDIDATES = 1, 4, 8, 16
"""Multiples of rows that are tried for attention, the cheapest first; then blocks of the last one. MKL's
kernels for AVX2 compute 6 rows at once, and the last two of 8 or 32 in another order, but not those of 16."""
LARGEST_BLOCKS = 64, 32, 16
"""Rows of a layer's largest blocks that are tried. A prompt in blocks of 64 rows takes 1.0 to 1.4 times what
it takes at once in float32, 2 in bfloat16 with AMX; in blocks of 32, 4 with AMX."""
MAX_PADDED = 16
"""Smaller largest blocks are tried if a layer's smallest ones are not below this."""
PROBED = 128
"""Rows of a layer's test."""
CANCELLED = 2.0**-12
"""What is left of a test's sums when their large summands have cancelled each other: else rounding to 16
bits would hide all but one in thousands of the differences between orders."""
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
T = TypeVar("T")
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
    layers = list(_projections(model))
    blocks = {
        _kind(layer): _invariant_blocks(layer) for layer in {_kind(each): each for each in layers}.values()
    }
    for layer in layers:
        _compute_in_blocks(layer, blocks[_kind(layer)][1])
    widths = [_width(layer)[1] for layer in layers]
    return max(max(1, VECTOR // math.gcd(VECTOR, *widths)), *(fewest for fewest, _ in blocks.values()))


def invariant_product(first: Tensor, second: Tensor, rows: int, most: int | None = None) -> Tensor:
    """bmm of [P, R, K] and [P, K, N], the same bits for a row whatever R is, and with zeros behind K.

    ``rows``: R is padded to a multiple of it. ``most``: the most rows at once; None: all."""
    if first.dtype != torch.float32:
        return invariant_product(first.float(), second.float(), rows, most).to(first.dtype)
    if most is not None and first.shape[1] > most:
        blocks = torch.split(first, most, 1)
        return torch.cat([invariant_product(block, second, rows) for block in blocks], 1)
    count = first.shape[1]
    if count % rows:
        first = pad(first, (0, 0, 0, -count % rows))
    total = torch.bmm(first[..., :BLOCK], second[:, :BLOCK])
    for at in range(BLOCK, first.shape[2], BLOCK):
        total.baddbmm_(first[..., at : at + BLOCK], second[:, at : at + BLOCK])
    return total[:, :count]


Product = Callable[[Tensor, Tensor], Tensor]
"""bmm."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Product], Tensor]
"""Attention of query [P, G, C, D] with key [P, L, D] and value [P, L, V], where visible [P, 1, C, L]."""


def attention_product(attend: Attend, heads: int, size: int, value_size: int) -> Product:
    """The cheapest product with which attention gives a token the same bits alone, among others and with a
    longer padding. ``heads``: of a KV head; ``size``: of keys. Raises ConfigError if there is none."""
    generator = torch.Generator().manual_seed(0)
    longest, width = 5 * BLOCK, 80
    query = torch.randn((3, heads, width, size), generator=generator)
    key, value = (torch.randn((3, longest, each), generator=generator) for each in (size, value_size))

    def is_invariant(product: Product) -> bool:
        for length in (1, 15, 60, BLOCK + 9, 2 * BLOCK + 30, 4 * BLOCK):
            seen = (torch.arange(longest) <= length + torch.arange(width)[:, None]).expand(3, 1, -1, -1)
            whole = attend(query, key, value, seen, product)
            for pairs, first, last in ((1, 0, 1), (1, 4, 5), (2, 0, 3), (3, 2, 10), (2, 9, 74)):
                used = length + last  # no position behind the last query's is seen
                used += -used % QUANTUM
                for padded in (used, used + QUANTUM, min(longest, used + BLOCK)):
                    found = attend(
                        query[:pairs, :, first:last],
                        key[:pairs, :padded],
                        value[:pairs, :padded],
                        seen[:pairs, :, first:last, :padded],
                        product,
                    )
                    if not torch.equal(found, whole[:pairs, :, first:last]):
                        return False
        return True

    products = [partial(invariant_product, rows=rows) for rows in CANDIDATES]
    last = CANDIDATES[-1]
    return _first(is_invariant, [*products, partial(invariant_product, rows=last, most=last)], "attention")


def head_rows(make: Callable[[nn.Linear, int], Callable[[Tensor], Tensor]], projection: nn.Linear) -> int:
    """The smallest power of two from which on an LM head gives rows the same bits in every power of two.
    ``make``: the head with a projection, whose rows are padded to a power of two from there on."""
    out, width = projection.weight.shape
    weight, values = _cancelling(width, out, projection.weight.dtype)
    values = values[:64]
    other = nn.Linear(width, out, device="meta")
    other.weight = nn.Parameter(weight, requires_grad=False)
    other.bias = None if projection.bias is None else nn.Parameter(torch.zeros_like(projection.bias))

    def is_invariant(rows: int) -> bool:
        head = make(other, rows)
        whole = head(values)
        return all(torch.equal(head(values[:count]), whole[:count]) for count in (1, 2, 3, 5, 9, 17, 40))

    return _first(is_invariant, [1, 2, 4, 8, 16, 32, 64], "the output projection")


def _invariant_blocks(layer: Any) -> tuple[int, int]:
    """Rows of a layer's smallest and largest blocks: in all powers of two from the one to the other a row has
    the same bits, wherever it stands. Raises ConfigError when its place matters."""
    width, out = _width(layer)
    weight, values = _cancelling(width, out, layer.weight.dtype)
    parameters = {"weight": weight if isinstance(layer, nn.Linear) else weight.T.contiguous()}
    if layer.bias is not None:
        parameters["bias"] = torch.zeros_like(layer.bias)

    def computed(rows: int, values: Tensor = values) -> Tensor:
        blocks = torch.split(values, rows)
        return torch.cat([functional_call(layer, parameters, (block,)) for block in blocks])

    def fewest(most: int) -> int | None:
        whole = computed(most)
        if not torch.equal(computed(most, values.roll(-1, 0)), whole.roll(-1, 0)):
            return None
        rows = most
        while rows > 1 and torch.equal(computed(rows // 2), whole):
            rows //= 2
        return rows

    with torch.inference_mode():
        found = [(rows, most) for most in LARGEST_BLOCKS if (rows := fewest(most)) is not None]
    if not found:
        raise _not_invariant(f"a layer of {width} x {out}")
    return next((pair for pair in found if pair[0] <= MAX_PADDED), found[-1])


def _compute_in_blocks(layer: Any, most: int) -> None:
    original: Callable[[Tensor], Tensor] = layer.forward

    def forward(values: Tensor) -> Tensor:
        sizes = _block_sizes(values.shape[-2], most)
        if len(sizes) == 1:
            return original(values)
        return torch.cat([original(block) for block in torch.split(values, sizes, -2)], -2)

    layer.forward = forward


def _block_sizes(rows: int, most: int) -> list[int]:
    """Powers of two, of which ``most`` is one, that add up to ``rows``."""
    left = rows % most
    return [most] * (rows // most) + [
        1 << bit for bit in reversed(range(most.bit_length())) if left >> bit & 1
    ]


def _first(is_invariant: Callable[[T], bool], candidates: Sequence[T], what: str) -> T:
    with torch.inference_mode():
        for candidate in candidates:
            if is_invariant(candidate):
                return candidate
    raise _not_invariant(what)


def _not_invariant(what: str) -> ConfigError:
    return ConfigError(
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


def _cancelling(width: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [out, width] and values [PROBED, width] whose products' large summands cancel each other."""
    generator = torch.Generator().manual_seed(0)
    third = width // 3

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    shuffled = torch.randperm(width, generator=generator)
    large, weights = random(PROBED, third), random(out, third)
    small = random(PROBED, width - 2 * third) * CANCELLED
    weight = torch.cat([weights, -weights, random(out, width - 2 * third)], 1)
    return weight[:, shuffled], torch.cat([large, large, small], 1)[:, shuffled]


def _divide(module: Any) -> None:
    """Compute an activation function in pieces that no two threads share."""
    original: Callable[[Tensor], Tensor] = module.forward

    def forward(values: Tensor) -> Tensor:
        if values.numel() <= PIECE:
            return original(values)
        pieces = torch.split(values.reshape(-1), PIECE)
        return torch.cat([original(piece) for piece in pieces]).view(values.shape)

    module.forward = forward
