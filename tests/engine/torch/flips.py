"""How often a token changes when other rows, or other positions of its stream, are computed beside it.

    python -m tests.engine.torch.flips --dtype bfloat16 --model demo --tokens 128

The same histories are computed in several *lanes*, each with a KV cache of its own: streams decoded in groups
of some size, and positions verified several at a time. A lane's logits are compared with those of 64 streams
decoded together. Beside the tokens that differ it prints what is to be expected per million tokens, for which
fewer tokens suffice:

- random: the share of all uniform numbers for which inverse transform sampling at temperature 1 gives another
  token;
- greedy: the mean change of the margin between the two best tokens, times the density of margins at 0, which
  is taken from the smallest 2 % of the margins.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.serve import ServeConfig
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch import attention
from penstock.engine.torch.attention_metadata import token_positions
from penstock.engine.torch.media.families import is_whole_only
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import Head, read_shape
from tests.engine.torch.harness import make_model

STREAMS, WINDOW, PROMPT, BLOCK_SIZE = 64, 8, 24, 16
CPU = torch.device("cpu")


@dataclass
class Lane:
    """A way to compute the same histories."""

    streams: int
    """Streams in a forward pass."""
    width: int
    """Positions of each in a forward pass."""
    cache: Any = None
    tokens: int = 0
    greedy: int = 0
    random: float = 0.0
    drawn: int = 0
    changes: list[Tensor] = field(default_factory=list)
    """Of the margin between the two best tokens."""

    def __str__(self) -> str:
        return f"{self.streams:2} streams, {self.width} position{'s' if self.width > 1 else ''}"


class Study:
    def __init__(
        self, directory: Path, dtype: torch.dtype, longest: int, streams: int = STREAMS, **options: Any
    ) -> None:
        self.streams = streams
        self.shape = read_shape(str(directory))
        config = ServeConfig(device="cpu", threads=1, **options)
        head: Head = "seeing" if is_whole_only(directory) else "text"
        self.model = PagedModel(str(directory), config, self.shape, dtype=dtype, device=CPU, head=head)
        self.blocks = BlockTables(self.streams, self.streams * -(-longest // BLOCK_SIZE), BLOCK_SIZE, longest)
        for slot in range(self.streams):
            self.blocks.allocate_one(slot, -(-longest // BLOCK_SIZE))
        generator = torch.Generator().manual_seed(0)
        self.history = torch.randint(5, self.shape.vocab_size, (self.streams, longest), generator=generator)
        self.uniform = torch.rand((self.streams, longest), generator=generator, dtype=torch.float64)
        self.margins: list[Tensor] = []

    def new_cache(self) -> Any:
        self.model.make_cache(self.blocks.blocks + 1, BLOCK_SIZE)
        return self.model.attention

    def logits(self, lane: Lane, start: int, width: int) -> Tensor:
        """float32[self.streams, width, V] after the positions from ``start`` on."""
        found = []
        for first in range(0, self.streams, lane.streams):
            slots = np.arange(first, min(first + lane.streams, self.streams))
            found.append(
                torch.cat(
                    [
                        self._forward(lane, slots, at, min(lane.width, start + width - at))
                        for at in range(start, start + width, lane.width)
                    ],
                    1,
                )
            )
        return torch.cat(found)

    def _forward(self, lane: Lane, slots: Any, start: int, width: int) -> Tensor:
        self.model._attention = lane.cache
        count = np.full(len(slots), width, np.int32)
        singles = len(slots) if width == 1 else 0
        batch = Batch(
            slots=slots,
            start=np.full_like(count, start),
            count=count,
            singles=singles,
            decodes=len(slots),
            samples=slots,
            generations=np.zeros(len(slots), np.int64),
        )
        positions = token_positions(batch)
        hidden = self.model.hidden(
            self.history[torch.from_numpy(np.repeat(slots, width)), torch.from_numpy(positions)],
            torch.from_numpy(positions),
            lane.cache.layout_of(batch, self.blocks, positions, CPU)[1],
            torch.arange(len(positions)),
        )
        rows = self.model.head.rows
        logits = [self.model.head(hidden[at : at + rows]) for at in range(0, len(hidden), rows)]
        return torch.cat(logits).view(len(slots), width, -1)

    @torch.inference_mode()
    def run(self, lanes: list[Lane], tokens: int) -> None:
        """The first lane generates; half of the streams are greedy, half random."""
        for lane in lanes:
            lane.cache = self.new_cache()
            self.logits(Lane(self.streams, PROMPT, lane.cache), 0, PROMPT)
        for start in range(PROMPT, PROMPT + tokens, WINDOW):
            known = []
            for position in range(start, start + WINDOW):
                known.append(self.logits(lanes[0], position, 1))
                logits = known[-1][:, 0]
                drawn = draw(logits, self.uniform[:, position])
                drawn[::2] = logits[::2].argmax(-1)
                self.history[:, position + 1] = drawn
            reference = torch.cat(known, 1)
            best = reference.topk(2, -1)
            self.margins.append((best.values[..., 0] - best.values[..., 1]).flatten())
            for lane in lanes[1:]:
                found = self.logits(lane, start, WINDOW)
                at = found.gather(-1, best.indices)
                lane.changes.append(((at[..., 0] - at[..., 1]).flatten() - self.margins[-1]).abs())
                lane.tokens += self.streams * WINDOW
                lane.greedy += int((found.argmax(-1) != reference.argmax(-1)).sum())
                lane.random += float(other_tokens(found, reference).sum())
                uniform = self.uniform[:, start : start + WINDOW].flatten()
                lane.drawn += int(
                    (draw(found.flatten(0, 1), uniform) != draw(reference.flatten(0, 1), uniform)).sum()
                )

    def report(self, lane: Lane) -> str:
        margins = torch.cat(self.margins)
        few = margins.kthvalue(max(1, len(margins) // 50)).values
        changes = torch.cat(lane.changes)
        expected = float(changes.mean() / few / 50) if changes.any() else 0.0  # infinite where margins are 0
        same = float((changes == 0).float().mean())
        scale = 1e6 / lane.tokens
        return (
            f"{lane}: {lane.tokens} tokens, {same:.1%} of margins equal in bits; greedy {lane.greedy} flips, "
            f"{expected * 1e6:.3g} expected per million; random {lane.drawn} flips, "
            f"{round(lane.random * scale, 3):g} expected per million"
        )


def cumulative(logits: Tensor) -> Tensor:
    """float64[..., V]: the sampler's weights, summed."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp().double().cumsum(-1)
    return weights / weights[..., -1:]


def other_tokens(first: Tensor, second: Tensor) -> Tensor:
    """float64[...]: the share of uniform numbers with which two rows of logits [..., V] give other tokens."""
    ends = cumulative(first), cumulative(second)
    starts = [torch.nn.functional.pad(each[..., :-1], (1, 0)) for each in ends]
    common = torch.minimum(*ends) - torch.maximum(*starts)
    return 1 - common.clamp_(min=0).sum(-1)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """int64[n]: inverse transform sampling at temperature 1 of logits [n, V]."""
    return torch.searchsorted(cumulative(logits), uniform[:, None].contiguous(), right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float, **ignored: Any
) -> Tensor:
    """Attention of several positions as decodes compute it."""
    hidden = ~attn_mask[:, :, None]
    return attention._by_hand(query[:, None], key[:, 0], value[:, 0], hidden, scale, None, None, torch.bmm)[
        :, 0
    ]


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 320},
    "larger": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "initializer_range": 0.04,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=["demo", *MODELS])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="per stream, a multiple of 8")
    parser.add_argument(
        "--by-hand", action="store_true", help="attention without scaled_dot_product_attention"
    )
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.by_hand:
        attention.scaled_dot_product_attention = by_hand  # type: ignore[attr-defined,assignment]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.model == "demo":
            import penstock

            directory = Path(penstock.__file__).parent / "demo"
        else:
            make_model("llama", directory, **MODELS[options.model])
        study = Study(
            directory,
            getattr(torch, options.dtype),
            PROMPT + options.tokens + 1,
            batch_invariant=options.batch_invariant,
        )
        lanes = [
            Lane(64, 1),
            Lane(8, 1),
            Lane(1, 1),
            Lane(64, 2),
            Lane(64, 4),
            Lane(8, 4),
            Lane(64, 8),
            Lane(1, 5),
        ]
        study.run(lanes, options.tokens)
        print(
            f"{options.model}, {options.dtype}{', by hand' if options.by_hand else ''}"
            f"{', batch-invariant' if options.batch_invariant else ''}"
        )
        for lane in lanes[1:]:
            print(study.report(lane), flush=True)


if __name__ == "__main__":
    main()
