"""The embedded engine: any supported Hugging Face causal LM, on a CPU or a CUDA device."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from ...config.errors import ConfigError
from ...config.options import ServeConfig
from ...wire.frames import I32, Logprobs
from ...wire.messages import EngineInfo, Submit
from ..base import Load, StepRows
from ..blocks import BlockTables
from ..rows import joined, joined_logprobs
from ..sampling import SamplingColumns
from ..scheduler import Batch, Scheduler
from ..slots import SlotTable
from ..structured import GrammarCompiler
from ..vocabulary import read_eos_token_ids
from .attention import PagedAttention
from .layout import lay_out, token_positions
from .memory import keep_freed_memory
from .model import ModelShape, PagedModel, pick_device, pick_dtype, read_shape
from .sampler import Sampler

CPU_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.4
"""The default KV cache on a CPU: at most these bytes, and this share of the memory that is available."""
GRAMMAR_NAP_S = 0.002
"""How long a step without anything else to do waits for a grammar."""


class TorchEngine:
    """Continuous batching with chunked prefill over a paged KV cache."""

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model_dir: str,
        progress: Callable[[str, float | None], None],
        *,
        tokenizer_dir: str | None = None,
    ) -> None:
        """Loads the model. ``tokenizer_dir`` has tokenizer.json when ``model_dir`` has not.

        Raises ConfigError for what would fail the same way again.
        """
        progress("loading PyTorch", None)
        keep_freed_memory()
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) - 1))
        device = pick_device(config)
        shape = read_shape(model_dir)
        max_model_len = _max_model_len(config, shape)
        dtype = pick_dtype(config, _model_dtype(model_dir), device)
        progress("loading weights", 0.2)
        self._model = PagedModel(
            model_dir, dtype, device, lambda: _make_attention(config, shape, max_model_len, dtype, device)
        )
        attention = self._model.attention
        assert attention is not None
        blocks = len(attention.keys[0]) - 1  # one is the null block
        eos = read_eos_token_ids(Path(model_dir))
        self._table = SlotTable(config.max_num_seqs, max_model_len, eos)
        self._sampling = SamplingColumns(
            self._table,
            shape.vocab_size,
            GrammarCompiler(shape.vocab_size, eos, Path(tokenizer_dir or model_dir) / "tokenizer.json"),
        )
        self._blocks = BlockTables(config.max_num_seqs, blocks, config.block_size, max_model_len)
        self._scheduler = Scheduler(self._table, self._sampling, self._blocks, config)
        self._sampler = Sampler(self._sampling)
        self._device = device
        self._info = EngineInfo(
            engine="torch",
            max_model_len=max_model_len,
            vocab_size=shape.vocab_size,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=eos,
            device=_device_name(device),
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_tokens=blocks * config.block_size,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        """Memory goes with the process."""

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        self._scheduler.submit(server, request)

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self._scheduler.abort(server, streams)

    def drop_server(self, server: int) -> None:
        self._scheduler.drop_server(server)

    def fail_all(self, code: str, message: str) -> StepRows:
        return self._scheduler.fail_all(code, message)

    # -- the step

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> StepRows:
        aborted = self._scheduler.take_aborted()
        batch = self._scheduler.schedule()
        if not len(batch):
            self._sampling.grammars.wait(GRAMMAR_NAP_S)
            return aborted
        tokens, logprobs = self._run(batch)
        rows = self._scheduler.settle(batch, tokens, logprobs)
        return joined([aborted, rows])

    @torch.inference_mode()
    def _run(self, batch: Batch) -> tuple[I32, Logprobs | None]:
        """The forward pass and the sampled tokens, int32[len(batch.samples)]."""
        positions = token_positions(batch)
        tokens = self._table.history[np.repeat(batch.slots, batch.count), positions]
        slots = batch.slots[batch.samples]
        self._sampling.prepare(slots)
        attention = self._model.attention
        assert attention is not None
        hidden = self._model.hidden(
            self._to_device(tokens),
            self._to_device(positions),
            lay_out(batch, self._blocks, attention.geometry, self._device),
            self._to_device(np.cumsum(batch.count)[batch.samples] - 1),
        )
        return self._sample(hidden, slots)

    def _sample(self, hidden: torch.Tensor, slots: NDArray[np.intp]) -> tuple[I32, Logprobs | None]:
        """A few rows at a time, as logits are large; no row's token depends on other rows."""
        tokens = np.zeros(len(slots), np.int32)
        parts = []
        for first in range(0, len(slots), self._model.head.rows):
            rows = slice(first, first + self._model.head.rows)
            tokens[rows], logprobs = self._sampler.sample(self._model.head(hidden[rows]), slots[rows])
            if logprobs is not None:
                logprobs.token += np.int32(first)
                parts.append(logprobs)
        return tokens, joined_logprobs(parts)

    def _to_device(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    # -- what it reports

    def load(self) -> Load:
        return Load(self._scheduler.waiting(), self._scheduler.running(), self._blocks.used_share())

    def metrics(self) -> dict[str, float]:
        scheduler = self._scheduler
        return {
            "steps_total": scheduler.steps,
            "prompt_tokens_total": scheduler.prompt_tokens,
            "generation_tokens_total": scheduler.generated_tokens,
            "preemptions_total": scheduler.preemptions,
            "requests_waiting": scheduler.waiting(),
            "requests_running": scheduler.running(),
            "kv_cache_usage": self._blocks.used_share(),
        }

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        raise ValueError(f"the torch engine has no operation {method!r}")


def _max_model_len(config: ServeConfig, shape: ModelShape) -> int:
    if config.max_model_len is None:
        return shape.max_positions
    if config.max_model_len > shape.max_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model takes at most {shape.max_positions} tokens"
        )
    return config.max_model_len


def _model_dtype(model_dir: str) -> torch.dtype | None:
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(model_dir, local_files_only=True).dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _make_attention(
    config: ServeConfig, shape: ModelShape, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> PagedAttention:
    """The KV cache, sized once the weights are in memory. Raises ConfigError when it could hold nothing."""
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_size * dtype.itemsize
    budget = config.kv_cache_memory or _default_budget(config, device)
    blocks = budget // (per_token * config.block_size) - 1  # one is the null block
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = min(blocks, most)
    if blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory: {budget} bytes hold no block of {config.block_size} tokens "
            f"({per_token} bytes a token); at least {2 * per_token * config.block_size} are needed"
        )
    return PagedAttention(
        shape.layers, blocks + 1, config.block_size, shape.kv_heads, shape.head_size, dtype, device
    )


def _default_budget(config: ServeConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    return int(min(CPU_CACHE_BYTES, CPU_CACHE_SHARE * psutil.virtual_memory().available))
