"""The engine's logprobs are those of a trainer's forward pass, up to what a dtype rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.logprob_differences import (
    COLUMNS,
    DEMO_DIR,
    Differences,
    compare,
    demo_prompts,
    difference,
    load,
    main,
    make_engine,
    random_prompts,
    run,
    write_experts,
)
from tests.engine.torch.harness import cpu_only

pytestmark = cpu_only("on a CUDA device --batch-invariant is refused, and float16 is another kernel's")
FLOAT32 = 1e-4
"""Ten times what float32 rounds in these models."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("experts"))
    write_experts(directory, num_hidden_layers=2, vocab_size=320)
    return directory


def check(found: Differences) -> None:
    ours = [value(found) for name, value in COLUMNS if "transformers" not in name]
    if found.dtype == "float32":
        assert max(ours) < FLOAT32
    else:
        assert max(ours) <= 2 * max(found.own_cache, found.rounding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_with_experts(experts: str, dtype: str) -> None:
    check(compare(experts, dtype, random_prompts(320, 6), 16, batch_invariant=False))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model(dtype: str, batch_invariant: bool) -> None:
    prompts = demo_prompts(str(DEMO_DIR), 5)
    check(compare(str(DEMO_DIR), dtype, prompts, 16, batch_invariant=batch_invariant))


def test_with_batch_invariance_it_is_the_same_bits_in_every_way() -> None:
    prompts = demo_prompts(str(DEMO_DIR), 4)
    found = []
    for chunks in (False, True):
        engine = make_engine(str(DEMO_DIR), "bfloat16", batch_invariant=True, streams=4, chunks=chunks)
        found += [run(engine, prompts, 12) for _ in range(2)]  # the second one with cached prompts
    assert found[0] == found[1] == found[2] == found[3]


def test_other_weights_are_seen(experts: str) -> None:
    engine = make_engine(experts, "float32", batch_invariant=False, streams=2, chunks=False)
    streams = run(engine, random_prompts(320, 2), 8)
    model = load(experts, "float32")
    assert difference(model, streams) < FLOAT32
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight *= 1.01
    assert difference(model, streams) > FLOAT32


def test_the_table(experts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", experts, "--dtypes", "float32", "--streams", "2", "--tokens", "3"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == row.count("|")
    assert row.startswith(f"| {Path(experts).name} | float32 | off |")
