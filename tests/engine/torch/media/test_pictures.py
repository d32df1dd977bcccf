"""Every family that sees against transformers' own generation, with 0, 1 and 4 pictures in a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.torch import model as model_module
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.media.picture_encoder import encode_largest, feature_bytes
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from penstock.media.store import MediaStore
from penstock.wire.messages import Submit
from penstock.wire.weights.desired import WeightSource
from tests.engine.torch.adapters import load, train
from tests.engine.torch.harness import (
    DEVICE,
    IMAGE,
    SMALL_ENGINE,
    Driver,
    assert_alike,
    cpu_only,
    make_engine,
    make_model,
    run_all,
)
from tests.engine.torch.media.pictures import FAMILIES, Picture, Prompt, asking, flat, generated, picture
from tests.engine.torch.plain_kernel import KERNEL
from tests.engine.torch.test_decode_graphs import Recordings
from tests.engine.torch.weights import changed

LIKE_OTHERS = {"smolvlm"}
"""Families whose encoder is another one's."""
TOKENS = 10
CHUNK = 24
"""Tokens of a step, fewer than the longest pictures' and more than those of pictures in one step."""


class Family(NamedTuple):
    kind: str
    directory: Path
    model: transformers.PreTrainedModel
    store: MediaStore
    supply: PageSupply
    prompts: dict[int, Prompt]
    expected: dict[int, list[int]]
    """What transformers makes of each."""

    def engine(self, **options: Any) -> TorchEngine:
        return make_engine(self.directory, pages=self.supply, max_num_batched_tokens=CHUNK, **options)

    def ask(self, stream: int, **options: Any) -> Submit:
        return asking(self.store, stream, self.prompts[stream], max_tokens=TOKENS, **options)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    kind, directory = request.param, tmp_path_factory.mktemp(request.param)
    model = make_model(kind, directory)
    pictures = [picture(kind, number) for number in range(6)]
    text = np.random.default_rng(7).integers(3, 300, size=200).tolist()
    prompts: dict[int, Prompt] = {
        0: text[:30],
        1: [*text[:5], pictures[0], *text[5:20]],
        2: [pictures[1], *text[40:43], pictures[2], pictures[3], *text[43:60], pictures[4], text[60]],
        3: [*text[:5], pictures[5], *text[5:20]],
        4: [*text[70:75], pictures[0], *text[75:90], pictures[0], text[91]],
    }
    expected = {stream: generated(model, prompt, TOKENS) for stream, prompt in prompts.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(prompts)
    store = MediaStore(str(tmp_path_factory.mktemp("store")), 64 << 20)
    supply = PageSupply(store)
    yield Family(kind, directory, model, store, supply, prompts, expected)
    supply.close()
    store.close()


def tokens_of(engine: TorchEngine, requests: Sequence[Submit]) -> dict[int, list[int]]:
    outcomes = run_all(engine, requests)
    assert not any(each.error for each in outcomes.values())
    return {stream: outcome.tokens for stream, outcome in outcomes.items()}


each_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)
each_encoder = pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LIKE_OTHERS), indirect=True)


@each_family
def test_alone_beside_others_and_again(family: Family) -> None:
    engine = family.engine()
    assert engine.media is not None
    alone = {stream: tokens_of(engine, [family.ask(stream)])[stream] for stream in family.prompts}
    assert_alike(family.expected, alone)
    assert engine.media.encoded == 6, "a picture was encoded twice"
    engine = family.engine()
    assert_alike(family.expected, tokens_of(engine, [family.ask(stream) for stream in family.prompts]))
    hits = engine.metrics()["prefix_cache_hits_total"]
    assert_alike(family.expected, tokens_of(engine, [family.ask(stream) for stream in family.prompts]))
    computed = sum(len(flat(prompt)) // 16 * 16 for prompt in family.prompts.values())
    assert engine.metrics()["prefix_cache_hits_total"] - hits > computed / 2
    assert engine.media is not None
    assert engine.media.encoded == 6


@each_encoder
def test_another_picture_shares_no_block(family: Family) -> None:
    """The same text and length: what follows a picture is found with the same picture alone."""
    engine = family.engine(block_size=4)
    first, text = picture(family.kind, 0), family.prompts[0]
    same = Picture(
        b"another picture.", {**first.arrays, "pixel_values": -first.arrays["pixel_values"]}, first.ids
    )
    hits = []
    for given in (first, same, first):
        prompt = [*text[:8], given, *text[8:]]
        before = engine.metrics()["prefix_cache_hits_total"]
        found = tokens_of(engine, [asking(family.store, 0, prompt, max_tokens=TOKENS)])[0]
        assert_alike({0: generated(family.model, prompt, TOKENS)}, {0: found})
        hits.append(engine.metrics()["prefix_cache_hits_total"] - before)
    assert hits[0] == 0
    assert hits[1] == 8
    assert hits[2] >= 8 + len(first.ids)


@each_encoder
def test_preempted_and_resumed(family: Family) -> None:
    engine = family.engine(enable_prefix_caching=False)
    driver = Driver(engine)
    for stream in family.prompts:
        driver.submit(family.ask(stream))
    for steps in (2, 5, 6):
        for _ in range(steps):
            driver.step()
        engine._scheduler.preempt_all()
    found = {stream: outcome.tokens for stream, outcome in driver.run().items()}
    assert_alike(family.expected, found)
    resumed = []
    for stream, tokens in family.expected.items():
        request = family.ask(stream, resumed=4)
        more = request.prompt + np.array(tokens[:4], "<i4").tobytes()
        resumed.append(msgspec.structs.replace(request, prompt=more))
    rest = tokens_of(family.engine(), resumed)
    assert_alike({stream: tokens[4:] for stream, tokens in family.expected.items()}, rest)


@each_encoder
def test_drafts(family: Family) -> None:
    engine = family.engine(speculative_method="ngram", speculative_tokens=3)
    requests = [family.ask(stream, min_tokens=TOKENS) for stream in family.prompts]
    plain = tokens_of(family.engine(), requests)
    assert_alike(plain, tokens_of(engine, requests))


@each_encoder
def test_adapters_of_the_text(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    engine = family.engine(enable_lora=True)
    tuned = train(
        make_model(family.kind, tmp_path / "again"),
        tmp_path / "adapter",
        target_modules=r".*(?:language_model|text_model)\..*\.(?:q_proj|v_proj|down_proj)",
    )
    load(engine, {"a": tmp_path / "adapter"})
    requests = [
        msgspec.structs.replace(family.ask(stream), adapter="a" if stream % 2 else None)
        for stream in family.prompts
    ]
    expected = {
        stream: generated(tuned, prompt, TOKENS) if stream % 2 else family.expected[stream]
        for stream, prompt in family.prompts.items()
    }
    assert_alike(expected, tokens_of(engine, requests))
    assert expected[1] != family.expected[1]


@cpu_only("a GPU has kernels and graphs in all tests")
@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"], indirect=True)
def test_kernels_and_recorded_decodes(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach and rotary positions where histories are read in place; recorded decodes of prompts with
    pictures, whose positions differ from those in histories, beside text."""
    made = Recordings()
    monkeypatch.setattr(model_module, "find_kernel", lambda device: KERNEL)
    monkeypatch.setattr(model_module, "find_capture", lambda device: made)
    engine = family.engine(max_num_seqs=2, max_model_len=128, enforce_eager=family.kind == "gemma3")
    assert_alike(family.expected, tokens_of(engine, [family.ask(stream) for stream in family.prompts]))
    assert made.replayed >= TOKENS or family.kind == "gemma3"


@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_a_grid_of_another_picture_is_refused(family: Family) -> None:
    request = family.ask(1)
    (item,) = request.media
    wrong = msgspec.structs.replace(item, grid=(1, item.grid[1] + 2, item.grid[2]))
    with pytest.raises(RequestRejected, match=r"media\[0\]: a grid of \[1, .* features next to each other"):
        family.engine().submit(0, msgspec.structs.replace(request, media=(wrong,)))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"], indirect=True)
def test_sleep_and_other_weights(family: Family, tmp_path: Path) -> None:
    """Features are forgotten with the weights that made them, and the encoder gets others as well."""
    engine = family.engine()
    requests = [family.ask(stream) for stream in family.prompts]
    assert_alike(family.expected, tokens_of(engine, requests))
    for level in (1, 2):
        engine.call("sleep", {"level": level})
        engine.call("wake_up", {})
        assert_alike(family.expected, tokens_of(engine, requests))
    assert engine.media is not None
    assert engine.media.encoded == 3 * 6
    other = changed(family.directory, tmp_path)
    plan = engine.weights.plan([WeightSource(str(tmp_path))])
    engine.weights.load(plan, drop_cache=True, in_step=False, tick=lambda: None)
    expected = {stream: generated(other, prompt, TOKENS) for stream, prompt in family.prompts.items()}
    assert_alike(expected, tokens_of(engine, requests))
    named_as_text = {"model.norm.weight": torch.full((32,), 2.0), "lm_head.weight": torch.ones(320, 32)}
    save_file(named_as_text, tmp_path / "text.safetensors")
    plan = engine.weights.plan([WeightSource(str(tmp_path / "text.safetensors"), [*named_as_text])])
    engine.weights.load(plan, drop_cache=True, in_step=False, tick=lambda: None)
    assert bool((engine.model.whole.model.language_model.norm.weight == 2.0).all())


@pytest.mark.parametrize("family", ["idefics3"], indirect=True)
def test_pages_that_do_not_fit_end_their_stream_alone(family: Family) -> None:
    first, text = picture(family.kind, 0), family.prompts[0]
    wrong = {
        1: Picture(b"other arguments.", {"pixels": first.arrays["pixel_values"]}, first.ids),
        2: Picture(b"another channel.", {"pixel_values": first.arrays["pixel_values"][:, :, :2]}, first.ids),
        3: Picture(b"more features...", first.arrays, [*first.ids, IMAGE]),
    }
    requests = [asking(family.store, stream, [*text, each]) for stream, each in wrong.items()]
    outcomes = run_all(family.engine(), [*requests, family.ask(0)])
    assert outcomes[0].tokens == family.expected[0]
    assert "what was prepared of a picture" in outcomes[1].error
    assert "what was prepared of a picture" in outcomes[2].error
    assert (
        f"{first.ids.count(IMAGE)} features for {first.ids.count(IMAGE) + 1} image tokens"
        in outcomes[3].error
    )


@cpu_only("on a GPU memory is measured")
def test_the_largest_picture_is_encoded_with_the_largest_steps(tmp_path: Path) -> None:
    for kind in FAMILIES:
        make_model(kind, tmp_path)
        config = ServeConfig(**SMALL_ENGINE, encoder_cache_tokens=1000)
        shape = read_shape(str(tmp_path))
        model = PagedModel(str(tmp_path), config, shape, dtype=torch.float32, device=DEVICE, head="seeing")
        encode_largest(model, config)
        assert feature_bytes(model, config) == 1000 * 32 * 4
