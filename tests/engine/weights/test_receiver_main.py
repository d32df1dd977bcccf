"""The file that a receiver of broadcasts writes."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from penstock.engine.weights.receiver_main import lay_out, receive  # noqa: E402
from penstock.wire.weights.transfer import BroadcastTensor, Transfer  # noqa: E402

TENSORS = [
    BroadcastTensor("mark", "uint8", (3,)),
    BroadcastTensor("half", "bfloat16", (2, 5)),
    BroadcastTensor("one", "float32", ()),
    BroadcastTensor("long", "float64", (7,)),
]


def test_each_tensor_begins_at_a_multiple_of_its_element() -> None:
    _, places = lay_out(TENSORS)
    assert [place % size for place, size in zip(places, (1, 2, 4, 8), strict=True)] == [0, 0, 0, 0]


def test_the_file_has_what_is_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {
        tensor.name: torch.arange(max(1, torch.Size(tensor.shape).numel()))
        .to(getattr(torch, tensor.dtype))
        .reshape(tensor.shape)
        for tensor in TENSORS
    }
    values = iter(sent.values())

    def broadcast(into: torch.Tensor, src: int) -> None:
        into.copy_(next(values).reshape(-1).view(torch.uint8))

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    path = tmp_path / "received.safetensors"
    receive(Transfer(str(path), TENSORS))
    found = load_file(path)
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
    with pytest.raises(FileExistsError):
        receive(Transfer(str(path), TENSORS))


def test_a_broadcast_that_is_too_short_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.broadcast", lambda into, src: into[:40].zero_())
    tensors = [BroadcastTensor("long", "float64", (7,))]
    with pytest.raises(RuntimeError, match=r"long: fewer than the 56 bytes of float64 \[7\] came"):
        receive(Transfer(str(tmp_path / "received.safetensors"), tensors))
