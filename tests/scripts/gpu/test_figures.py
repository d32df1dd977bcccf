"""What the stages compute from what they measure; these tests need the torch extra."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tokenizers import Tokenizer

from penstock.engine.torch.model_loader import read_shape
from scripts.gpu.beside import load_model, settings_of
from scripts.gpu.device_time import DEVICE_EVENTS, record, spans_of, summarise
from scripts.gpu.host_phases import PHASES, timed_phases
from scripts.gpu.roofline import decode_row, parameters_of, prefill_flops, prefill_row, served_rows
from scripts.gpu.serving import Load, beside_vllm
from scripts.gpu.shapes import find_shape


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [(0.0, 10.0, "a"), (5.0, 15.0, "b"), (6.0, 9.0, "within"), (30.0, 40.0, "a")]
    found = summarise(spans, steps=2)
    assert found.busy_ms == pytest.approx(0.0125)
    assert found.kernels == 1.5
    assert found.by_name == pytest.approx({"a": 0.01, "b": 0.005})
    assert found.of(("b",)) == pytest.approx(0.005)


def test_only_what_the_device_does_is_busy() -> None:
    """Categories as PyTorch's profiler writes them on a GPU."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "_attend", "ts": 10, "dur": 4},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 20.5, "dur": 1.5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 10},
        {"ph": "M", "name": "process_name"},
    ]
    found = spans_of(events, DEVICE_EVENTS)
    assert found == [(10.0, 14.0, "_attend"), (20.5, 22.0, "Memcpy HtoD")]


def test_an_empty_recording_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="recorded nothing"):
        record("cpu", 1, lambda: None)


def test_operators_are_recorded_on_a_cpu() -> None:
    matrix = torch.ones(64, 64)
    found = record("cpu", 4, lambda: matrix @ matrix)
    assert found.kernels == 1
    assert list(found.by_name) == ["aten::matmul"]
    assert found.busy_ms > 0


def test_phases_are_timed_and_put_back() -> None:
    methods = {phase: getattr(owner, name) for phase, (owner, name) in PHASES.items()}
    with timed_phases() as spent:
        assert spent == dict.fromkeys(PHASES, 0.0)
        assert all(getattr(owner, name) is not methods[phase] for phase, (owner, name) in PHASES.items())
    assert methods == {phase: getattr(owner, name) for phase, (owner, name) in PHASES.items()}


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("name", ["opt-125m", "llama-8b"])
def test_shapes(name: str, tiny: bool, tmp_path: Path) -> None:
    shape = find_shape(name, tiny=tiny)
    folder = shape.write(tmp_path)
    read = read_shape(folder)
    assert (read.layers, read.heads, read.head_size) == (shape.layers, shape.heads, shape.head_size)
    assert shape.kv_bytes_per_token(2) == 2 * read.layers * read.kv_heads * read.head_size * 2
    assert shape.longest <= read.max_positions
    assert Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab_size() == read.vocab_size
    prompts = shape.prompts(3, 20)
    assert len({tuple(prompt[:16]) for prompt in prompts + shape.prompts(3, 20, seed=1)}) == 6
    assert all(len(prompt) == 20 and max(prompt) < read.vocab_size for prompt in prompts)


def test_parameters_are_those_of_the_published_models(tmp_path: Path) -> None:
    llama = parameters_of(find_shape("llama-8b", tiny=False).write(tmp_path))
    assert find_shape("llama-8b", tiny=False).parameters == 8_030_261_248
    assert llama.prefill == 8_030_261_248 - 2 * 128256 * 4096
    assert llama.decode == 8_030_261_248 - 128256 * 4096
    opt = parameters_of(find_shape("opt-125m", tiny=False).write(tmp_path))
    assert opt.decode == find_shape("opt-125m", tiny=False).parameters == 125_239_296
    assert opt.prefill == 125_239_296 - 50272 * 768


def test_a_roofline() -> None:
    told = {"KV GB": 4.0, "step ms": 20.0, "device busy ms": 12.5, "attention ms": 4.0}
    row = decode_row(told, 16e9, 2e12)
    assert row["floor ms"] == pytest.approx(10.0)
    assert row["achieved %"] == pytest.approx(50.0)
    assert row["device achieved %"] == pytest.approx(80.0)
    assert row["attention GB/s"] == pytest.approx(1000.0)
    assert row["attention %"] == pytest.approx(50.0)
    shape = find_shape("llama-8b", tiny=False)
    flops = prefill_flops(shape, 7_000_000_000, 2, 1000)
    assert flops == pytest.approx(2 * (14e12 + 4 * 32 * 4096 * 500_500))
    row = prefill_row({"ms": 100.0}, 20e12, 400e12)
    assert row["achieved %"] == pytest.approx(50.0)
    assert row["TFLOP/s"] == pytest.approx(200.0)


def test_serving_beside_the_engine_alone() -> None:
    served = {
        "64 streams, 128 in, 128 out, interval 1": {"ITL p50 ms": 10.0},
        "64 streams, 128 in, 128 out, interval 10": {"ITL p50 ms": 100.0},
        "1 stream, 128 in, 128 out, interval 1": {"ITL p50 ms": 5.0, "error": "late"},
        "256 streams, 128 in, 128 out, interval 1": {"ITL p50 ms": 20.0},
    }
    steps = {
        "64 streams, context 512": {"step ms": 9.0, "device busy ms": 8.0},
        "64 streams, context 2,048": {"step ms": 19.0, "device busy ms": 18.0},
        "256 streams, context 512": {"step ms": 19.0},
    }
    rows = served_rows(served, steps)
    assert list(rows) == ["64 streams, 128 in, 128 out, interval 1"]
    (row,) = rows.values()
    assert row == {
        "ITL p50 ms": 10.0,
        "step ms": 9.0,
        "device busy ms": 8.0,
        "engine alone": "64 streams, context 512",
        "device idle %": pytest.approx(20.0),
    }


def test_a_device_that_is_busier_than_the_step_is_long_shows() -> None:
    """As where an engine alone has longer contexts, or other clocks."""
    served = {"1 stream, 128 in, 128 out, interval 1": {"ITL p50 ms": 4.0}}
    (row,) = served_rows(served, {"1 stream, context 512": {"step ms": 6.0, "device busy ms": 5.0}}).values()
    assert row["device idle %"] == pytest.approx(-25.0)


def test_transformers_samples_as_the_server_does(tmp_path: Path) -> None:
    """At temperature 1 from the whole vocabulary: nothing changes the logits."""
    pytest.importorskip("transformers.generation.continuous_batching")
    model = load_model(find_shape("opt-125m", tiny=True).write(tmp_path), "cpu")
    generation = settings_of(Load(1, 8, 16, 1, 20), tiny=True)["generation_config"]
    assert generation.do_sample
    assert list(model._get_logits_processor(generation)) == []


def test_seeds_are_compared_with_vllms_figures() -> None:
    assert beside_vllm({"requests/s": 26.2}, 2000)["to vLLM"] == pytest.approx(2.0)
    assert beside_vllm({"requests/s": 26.2}, 50) == {}


def test_models_are_written_whole(tmp_path: Path) -> None:
    find_shape("opt-125m", tiny=True).write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 512
