"""What crosses between host and device while tokens are sampled: pinned copies that nothing waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.torch import transfer
from penstock.engine.torch.sampling.grammar_mask import apply_token_mask
from penstock.engine.torch.sampling.sampler import SOME_CANDIDATES, Sampler
from tests.engine.torch.harness import submit

VOCAB = SOME_CANDIDATES + 400
DEVICE = torch.device("meta")
"""Its tensors have shapes, but no values: whatever reads one on the host raises."""
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "large top-k": {"temperature": 1.0, "top_k": SOME_CANDIDATES + 20, "top_p": 0.5},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.3},
    "occurrence": {"presence_penalty": 0.4, "frequency_penalty": 0.1, "temperature": 1.0},
    "bias": {"logit_bias": {3: 1.0}},
    "long bias": {"logit_bias": dict.fromkeys(range(500), 0.5)},
    "allowed": {"allowed_token_ids": (1, 2, 3)},
    "bad words": {"bad_words": ((1, 2), (5,))},
    "min tokens": {"min_tokens": 300, "stop_token_ids": (4,)},
    "logprobs": {"logprobs": 3},
}


class Crossings(TorchDispatchMode):
    """Notes the operators that have tensors of two devices and are not copies of pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []
        self.pinned: list[torch.Tensor] = []
        self.copies = 0

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {tensor.device.type for tensor in tensors((args, result))}
        if len(devices) > 1:
            if kwargs and kwargs.get("non_blocking") and any(args[0] is pinned for pinned in self.pinned):
                self.copies += 1
            else:
                self.others.append(str(func))
        return result


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossings]:
    def no_literals(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch.tensor() copies from pageable memory")

    with torch.inference_mode(), Crossings() as crossings:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: crossings.pin(tensor))
        monkeypatch.setattr(torch, "tensor", no_literals)
        yield crossings


class Streams:
    """Streams whose samples nobody reads: tests write the histories."""

    def __init__(self, settings: list[dict[str, Any]]) -> None:
        self.table = SlotTable(len(settings), 400, [])
        metadata = SamplingMetadata(self.table, VOCAB)
        self.sampler = Sampler(metadata, torch.zeros(len(settings), dtype=torch.int64, device=DEVICE))
        self.slots = np.array([self._add(metadata, setting) for setting in settings], np.intp)

    def _add(self, metadata: SamplingMetadata, setting: dict[str, Any]) -> int:
        request = submit(self.table.running(), list(range(60)), max_tokens=400, **setting)
        slot = self.table.allocate(0, request)
        metadata.set(slot, request.sampling)
        return slot

    def append(self, tokens: int) -> None:
        for token in range(tokens):
            self.table.append(self.slots, np.full(len(self.slots), token, np.int32))

    def sample(self, drafts: int = 0) -> None:
        rows = np.repeat(self.slots, 1 + drafts)
        behind = np.tile(np.arange(1 + drafts, dtype=np.int32), len(self.slots))
        length = self.table.length[rows] + self.table.in_flight_tokens[rows] + behind
        output = self.sampler.sample(torch.empty((len(rows), VOCAB), device=DEVICE), rows, length)
        assert output.tokens.device == DEVICE


@pytest.mark.parametrize("names", [[name] for name in FEATURES] + [list(FEATURES)], ids=" and ".join)
def test_sampling_waits_for_no_copy(
    names: list[str], crossings: Crossings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def no_values(tensor: torch.Tensor) -> torch.Tensor:
        read.append(tensor)
        return torch.full(tensor.shape, 60, device="cpu", dtype=tensor.dtype)

    monkeypatch.setattr(transfer, "to_host", no_values)
    streams = Streams([FEATURES[name] for name in names])
    streams.sample()
    streams.append(1)
    streams.sample(drafts=2)
    streams.table.in_flight_tokens[:] = 1
    streams.sample()
    streams.table.in_flight_tokens[:] = 0
    for _ in range(2):
        streams.append(50)
        streams.sample(drafts=1)
    assert not crossings.others
    assert crossings.copies > 0 or names in (["greedy"], ["logprobs"])  # these need nothing from the host
    has_penalties = bool({"repetition", "occurrence"} & set(names))
    assert len(read) == has_penalties  # how many distinct tokens there are, once their bound has doubled


def test_masks_of_grammars_are_copied_from_pinned_memory(crossings: Crossings) -> None:
    masks = np.zeros((2, -(-VOCAB // 32) * 4), np.uint8)
    apply_token_mask(torch.empty((3, VOCAB), device=DEVICE), np.array([0, 2]), masks)
    assert not crossings.others
    assert crossings.copies > 0
