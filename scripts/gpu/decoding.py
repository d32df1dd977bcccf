"""The torch engine in this process, stepped by hand: streams that decode, and prompts."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from penstock.config.serve import ServeConfig
from penstock.engine.torch.engine import TorchEngine
from penstock.wire.messages import SamplingParams, Submit
from scripts.gpu.measuring import whole
from scripts.gpu.shapes import Shape

MAX_STEPS = 100_000


class SteppedEngine:
    """An engine of a shape with random weights."""

    def __init__(self, shape: Shape, folder: str, device: str, kv_bytes: int, **options: object) -> None:
        settings: dict[str, object] = {
            "model": folder,
            "load_format": "dummy",
            "device": device,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 8192,
            "max_model_len": min(shape.longest, shape.config["max_position_embeddings"]),
            "max_prefill_delay": 0.0,
            "kv_cache_memory": kv_bytes,
        }
        self.shape = shape
        self.engine = TorchEngine(
            ServeConfig(**(settings | options)),  # type: ignore[arg-type]
            folder,
            lambda text, fraction: None,
        )
        self._handle = 0
        self._running: list[int] = []

    @property
    def dtype_bytes(self) -> int:
        """Of the weights and the KV cache."""
        return int(getattr(torch, self.engine.info.dtype).itemsize)

    def submit(self, prompts: list[list[int]], output: int) -> None:
        for prompt in prompts:
            self._handle += 1
            self._running.append(self._handle)
            sampling = SamplingParams(max_tokens=output, seed=self._handle, ignore_eos=True)
            self.engine.submit(0, Submit(self._handle, np.array(prompt, "<i4").tobytes(), sampling))

    def until_decoding(self) -> float:
        """Steps until each stream has its first token. Returns the seconds. Raises RuntimeError."""
        began, first = time.perf_counter(), set[int]()
        for _ in range(MAX_STEPS):
            rows = whole(self.engine.step)
            if rows.failed:
                raise RuntimeError(rows.failed[0].message)
            first.update(rows.stream.tolist())
            if len(first) >= len(self._running):
                return time.perf_counter() - began
        raise RuntimeError(f"no first token within {MAX_STEPS} steps")

    def advance(self, steps: int) -> None:
        """Steps without a look at their rows."""
        for _ in range(steps):
            whole(self.engine.step)

    def step_ms(self, steps: int, rounds: int) -> float:
        """Milliseconds of a step, the median of rounds of several steps; what is launched ahead evens out.
        Raises RuntimeError when not every stream gets a token in each."""
        times, streams = [], len(self._running)
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(steps):
                rows = whole(self.engine.step)
                if len(rows.stream) != streams or rows.failed:
                    why = rows.failed[0].message if rows.failed else "the others wait or have ended"
                    raise RuntimeError(f"a step with {len(rows.stream)} of {streams} streams: {why}")
            times.append((time.perf_counter() - began) * 1000 / steps)
        return statistics.median(times)

    def end(self) -> None:
        """Aborts all streams."""
        self.engine.abort(0, self._running)
        self._running = []
        while self.engine.has_work():
            self.engine.step()

    def prefill_ms(self, prompts: list[list[int]]) -> float:
        """From the submission of prompts to the first tokens of all of them."""
        self.submit(prompts, 1)
        try:
            return self.until_decoding() * 1000
        finally:
            self.end()
