"""With --batch-invariant a token's logits have the same bits whatever is computed beside it.

A machine on which it cannot hold refuses the option; these tests then fail, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.torch import batch_invariance
from penstock.engine.torch.batch_invariance import invariant_product, make_invariant
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.sampling.sampler import Sampler
from penstock.engine.torch.supported_models import WITH_EXPERTS
from penstock.wire.arrays import I32
from penstock.wire.messages import Submit
from tests.engine.torch.flips import Lane, Study
from tests.engine.torch.harness import FAMILIES, cpu_only, make_engine, make_model, run_all, submit

pytestmark = cpu_only("on a CUDA device --batch-invariant is refused")

DENSE = sorted(FAMILIES.keys() - WITH_EXPERTS - {"llama4", "llama4_text"})
"""Those of Llama 4 have experts that are not split."""
Bits = dict[tuple[int, int], bytes]
"""Logits by stream and length of the history."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory)
    return directory


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def sampled_logits(directory: Path, requests: list[Submit], **options: Any) -> Bits:
    """The logits that each token was sampled from."""
    engine: TorchEngine = make_engine(directory, **options)
    table, bits = engine._table, Bits()

    class NotingSampler(Sampler):
        def sample(self, logits: Tensor, slots: NDArray[np.intp], length: I32, without: int = 0) -> Any:
            keys = zip(table.stream[slots].tolist(), length.tolist(), strict=True)
            for key, row in zip(keys, logits.numpy(), strict=True):
                assert bits.setdefault(key, row.tobytes()) == row.tobytes(), "preempted, and other bits"
            return super().sample(logits, slots, length, without)

    engine._runner.sampler = NotingSampler(engine._sampling)
    run_all(engine, requests)
    return bits


def request(stream: int) -> Submit:
    """Prompts of 3 to 450 tokens, which share a beginning; every other stream is greedy."""
    length = 3 + 149 * (stream % 4)
    prompt = [(7 * place + (stream if place > 40 else 0)) % 300 + 5 for place in range(length)]
    return submit(stream, prompt, max_tokens=12, temperature=float(stream % 2), ignore_eos=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_stream_alone_is_the_stream_beside_63_others(llama: Path, dtype: str) -> None:
    options: dict[str, Any] = {"batch_invariant": True, "dtype": dtype, "kv_cache_memory": 64 << 20}
    together = sampled_logits(llama, [request(stream) for stream in range(64)], **options)
    for stream in (0, 5, 38, 63):
        alone = sampled_logits(llama, [request(stream)], **options)
        assert len(alone) == 12
        assert alone == {key: row for key, row in together.items() if key[0] == stream}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 33},
        {"max_num_batched_tokens": 260, "enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"kv_cache_memory": 600 * 256},  # room for 600 tokens: streams are preempted, and computed in chunks
        {"block_size": 48},
    ],
)
def test_chunks_cached_prefixes_and_preemptions_change_no_bit(llama: Path, options: dict[str, Any]) -> None:
    requests = [request(stream) for stream in range(12)]
    expected = sampled_logits(llama, requests, batch_invariant=True, enable_prefix_caching=False)
    assert len(expected) == 12 * 12
    assert sampled_logits(llama, requests, batch_invariant=True, **options) == expected


@pytest.mark.parametrize("kind", DENSE)
def test_positions_computed_together_are_those_computed_one_by_one(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    assert_lanes_agree(Study(tmp_path, torch.float32, 60, 9, batch_invariant=True))


def test_activation_functions_are_not_divided_within_a_vector(threads: Callable[[int], None]) -> None:
    module = torch.nn.SiLU()
    some = torch.linspace(-5, 5, 4096)
    alone = torch.cat([module(value) for value in torch.split(some, 1)])
    if torch.equal(module(some), alone):
        pytest.skip("vectors compute no value otherwise")
    value = some[module(some) != alone][0]
    values = torch.full((64, 1600), float(value))  # whole vectors, which a third of them is not
    threads(3)
    assert not torch.equal(module(values), module(values[:1]).expand(64, -1)), "nothing to prevent"
    batch_invariance._divide(module)
    assert torch.equal(module(values), module(values[:1]).expand(64, -1))


def test_two_threads_change_nothing(tmp_path: Path, threads: Callable[[int], None]) -> None:
    make_model("starcoder2", tmp_path)
    threads(2)
    study = Study(tmp_path, torch.float32, 60, 9, batch_invariant=True)
    assert_lanes_agree(study, Lane(9, 4), Lane(3, 8))


def test_without_the_option_bits_differ(llama: Path) -> None:
    with pytest.raises(AssertionError, match="1 streams, 1 position"):
        assert_lanes_agree(Study(llama, torch.float32, 60, 9))


@torch.inference_mode()
def assert_lanes_agree(study: Study, *chosen: Lane) -> None:
    start, width = 24, 8
    lanes = chosen or (
        Lane(9, 1),
        Lane(1, 1),
        Lane(5, 1),
        Lane(1, 5),
        Lane(4, 3),
        Lane(9, 8),
        Lane(9, 2),
    )
    found = []
    for lane in lanes:
        lane.cache = study.new_cache()
        study.logits(Lane(lane.streams, start, lane.cache), 0, start)
        found.append(study.logits(lane, start, width))
    for lane, logits in zip(lanes, found, strict=True):
        assert torch.equal(logits, found[0]), str(lane)


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.integers(1, 5),
    count=st.integers(1, 40),
    summands=st.sampled_from([16, 112, 128, 144, 304, 512]),
    width=st.sampled_from([8, 16, 48, 200]),
    zeros=st.sampled_from([0, 16, 160]),
)
def test_a_steady_product_is_one_and_ignores_zeros_and_other_rows(
    pairs: int, count: int, summands: int, width: int, zeros: int
) -> None:
    generator = torch.Generator().manual_seed(summands)
    first = torch.randn((pairs, count, summands), generator=generator)
    second = torch.randn((pairs, summands + zeros, width), generator=generator)
    padded = torch.nn.functional.pad(first, (0, zeros))
    found = invariant_product(padded, second, 16, 16)
    exact = (first.double() @ second[:, :summands].double()).float()
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[-1:, -1:], invariant_product(first[-1:, -1:], second[-1:, :summands], 16, 16))


def test_a_machine_on_which_a_rows_place_matters_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.nn.functional.linear

    def restless(values: Tensor, *rest: Any) -> Tensor:
        return plain(values, *rest) * (1 + 1e-6 * torch.arange(values.shape[-2])[:, None])

    monkeypatch.setattr(torch.nn.functional, "linear", restless)
    with pytest.raises(
        ConfigError, match=r"--batch-invariant: on this machine a layer of 32 x \d+ gives a row"
    ):
        make_engine(llama, batch_invariant=True)


def test_layers_whose_bits_depend_on_any_number_of_rows_compute_blocks_of_one_size(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sizes = torch.nn.functional.linear, set()

    def restless(values: Tensor, *rest: Any) -> Tensor:
        sizes.add(values.shape[-2])
        return plain(values, *rest) * (1 + 1e-5 * values.shape[-2])

    monkeypatch.setattr(torch.nn.functional, "linear", restless)
    study = Study(llama, torch.float32, 60, 9, batch_invariant=True)
    sizes.clear()
    assert_lanes_agree(study)
    assert sizes == {16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_to_16_bits_does_not_hide_an_order_of_additions(dtype: torch.dtype) -> None:
    weight, values = batch_invariance._cancelling(64, 48, dtype)
    forward = torch.zeros(len(values), 48)
    backward = forward.clone()
    for at in range(64):
        forward += values[:, at, None].float() * weight[:, at].float()
        backward += values[:, 63 - at, None].float() * weight[:, 63 - at].float()
    assert (forward.to(dtype) != backward.to(dtype)).float().mean() > 0.01


def test_experts_and_gpus_are_refused(tmp_path: Path) -> None:
    make_model("mixtral", tmp_path)
    with pytest.raises(ConfigError, match="mixture of experts"):
        make_engine(tmp_path, batch_invariant=True)
    with pytest.raises(ConfigError, match="on a CPU only"):
        batch_invariance.refuse_device(torch.device("cuda", 0))


@pytest.mark.parametrize("options", [{"enable_lora": True}, {"block_size": 24}])
def test_options_that_bring_other_products_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"--batch-invariant: does not go with --(enable-lora|block-size 24)"
    ):
        ServeConfig(batch_invariant=True, **options)


def test_narrow_layers_fill_whole_vectors(tmp_path: Path) -> None:
    for width in (64, 72):
        multiple = make_invariant(make_model("llama", tmp_path, intermediate_size=width))
        assert multiple * width % 64 == 0
        assert multiple <= 16
