"""``penstock bench adapters``: the time of a decode step in which streams run many LoRA adapters.

The torch engine runs here, with random weights. Steps of the same streams without adapters and with them are
measured by turns, so that a change of the machine's load meets both. A step's time is CPU time of the process
where the model runs on a CPU, as other work takes less part in it, and elapsed time elsewhere.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.bench.deadline import ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.machine import Machine, this_machine
from penstock.bench.tables import format_table
from penstock.config.bench import BenchAdaptersConfig
from penstock.config.serve import ServeConfig
from penstock.distribution import pip_install
from penstock.wire.messages import Adapter, LoraInfo, SamplingParams, Submit

if TYPE_CHECKING:
    from penstock.engine.torch.engine import TorchEngine
    from penstock.engine.torch.lora.lora_layers import AdapterWeights

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
    "max_position_embeddings": 16384,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PROMPT_TOKENS = 32
WARM_STEPS = 5
"""Steps of each turn before the measured ones, once all prompts are computed."""


class AdapterRun(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a step's milliseconds; ``ratio``: with adapters to without."""

    rank: int
    base_ms: float
    adapters_ms: float
    ratio: float


class AdapterBenchmarkReport(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, one per rank, and the greatest ratio."""

    ratio: float
    adapters: int
    rows: int
    layers: int
    """Layers that each adapter changes."""
    device: str
    dtype: str
    runs: list[AdapterRun]
    machine: Machine


def render(report: AdapterBenchmarkReport) -> str:
    """The report as a table."""
    header = ("rank", "without", "with", "ratio")
    rows = [
        (str(run.rank), f"{run.base_ms:.2f} ms", f"{run.adapters_ms:.2f} ms", f"{run.ratio:.2f}")
        for run in report.runs
    ]
    title = (
        f"{report.adapters} adapters of {report.layers} layers over {report.rows} rows, {report.device}, "
        f"{report.dtype}; medians of a step"
    )
    return "\n".join([title, "", *format_table([header, *rows]), "", str(report.machine)])


def measure(config: BenchAdaptersConfig, say: ProgressCallback) -> AdapterBenchmarkReport:
    """Run all measurements; ``say`` gets a line before each. Raises BenchError, and ConfigError for a model
    that the engine does not run."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise BenchError(f"the torch engine is not installed: {pip_install('torch')}")
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        model = config.model
        if model is None:
            model = directory
            Path(directory, "config.json").write_bytes(msgspec.json.encode(SMALL_LLAMA))
        runs = []
        for rank in config.ranks:
            say(f"rank {rank}: {config.rounds} rounds of {config.steps} steps")
            turns = _Turns(config, model, rank)
            runs.append(_run(rank, turns))
    return AdapterBenchmarkReport(
        ratio=max(run.ratio for run in runs),
        adapters=config.adapters,
        rows=config.rows,
        layers=len(turns.lora.modules),
        device=turns.engine.info.device,
        dtype=turns.engine.info.dtype,
        runs=runs,
        machine=this_machine(),
    )


def _run(rank: int, turns: _Turns) -> AdapterRun:
    base, adapters = turns.measure()
    return AdapterRun(rank=rank, base_ms=base, adapters_ms=adapters, ratio=adapters / base)


class _Turns:
    """An engine with adapters of one rank, and what is measured with it."""

    def __init__(self, config: BenchAdaptersConfig, model: str, rank: int) -> None:
        from penstock.engine.torch.engine import TorchEngine

        self._config = config
        self._output = config.steps + WARM_STEPS + 1
        length = PROMPT_TOKENS + self._output
        self.engine: TorchEngine = TorchEngine(
            ServeConfig(
                load_format="dummy",
                max_model_len=length,
                max_num_seqs=config.rows,
                max_num_batched_tokens=max(config.rows * PROMPT_TOKENS, 2048),
                enable_prefix_caching=False,
                enable_lora=True,
                max_loras=config.adapters,
                max_lora_rank=rank,
                max_cpu_loras=config.adapters,
                threads=config.threads,
            ),
            model,
            lambda text, fraction: None,
        )
        if self.engine.info.kv_cache_tokens < config.rows * length:
            raise BenchError(
                f"the KV cache has room for {self.engine.info.kv_cache_tokens} tokens; --rows and --steps "
                f"need {config.rows * length}"
            )
        assert self.engine.info.lora is not None
        self.lora: LoraInfo = self.engine.info.lora
        self._clock = time.process_time if self.engine.info.device == "cpu" else time.perf_counter
        self._streams = count()
        self._load(rank)

    def _load(self, rank: int) -> None:
        table = self.engine.adapters
        assert table is not None
        adapters = [Adapter(f"a{number}", f"/a{number}") for number in range(self._config.adapters)]
        for seed, adapter in enumerate(adapters):
            table.add_adapter(adapter, _random_weights(self.engine, self.lora, rank, seed))
        table.make_current(adapters)

    def measure(self) -> tuple[float, float]:
        """Milliseconds of a step without adapters and with them."""
        self._turn(with_adapters=True)  # libraries choose their kernels
        base, adapters = [], []
        for _ in range(self._config.rounds):
            base += self._turn(with_adapters=False)
            adapters += self._turn(with_adapters=True)
        return statistics.median(base), statistics.median(adapters)

    def _turn(self, *, with_adapters: bool) -> list[float]:
        """Milliseconds of each measured step; all streams end with the turn."""
        rows = self._config.rows
        random = np.random.default_rng(0)
        for row in range(rows):
            prompt = random.integers(3, self.engine.info.vocab_size, PROMPT_TOKENS).astype("<i4")
            sampling = SamplingParams(self._output, row, temperature=0.0, ignore_eos=True)
            adapter = f"a{row % self._config.adapters}" if with_adapters else None
            self.engine.submit(0, Submit(next(self._streams), prompt.tobytes(), sampling, adapter=adapter))
        tokens = 0
        while tokens < rows:  # until each has its first one
            tokens += len(self.engine.step().tokens)
        for _ in range(WARM_STEPS):
            self.engine.step()
        taken = []
        for _ in range(self._config.steps):
            began = self._clock()
            self.engine.step()
            taken.append((self._clock() - began) * 1000)
        while self.engine.has_work():
            self.engine.step()
        return taken


def _random_weights(engine: TorchEngine, lora: LoraInfo, rank: int, seed: int) -> AdapterWeights:
    """Small random weights for every layer that an adapter may change."""
    import torch

    from penstock.engine.torch.lora.lora_layers import AdapterWeights

    torch.manual_seed(seed)
    dtype = getattr(torch, engine.info.dtype)
    layers = {
        path: (0.01 * torch.randn(rank, width, dtype=dtype), 0.01 * torch.randn(rank, output, dtype=dtype))
        for path, (output, width) in lora.modules.items()
    }
    return AdapterWeights(rank, layers)
