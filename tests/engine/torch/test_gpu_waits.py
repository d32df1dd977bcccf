"""On a GPU: PyTorch finds nothing in a step that makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.torch.harness import DEVICE, Driver, make_engine, make_model, submit
from tests.engine.torch.test_fake_cuda import KINDS, VOCAB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]

WARM_UP = 3
"""Steps in which kernels and libraries are loaded, which may wait."""


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Operators that wait raise; waiting for an event, as the engine does for its tokens, is none."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_no_step_waits_on_a_gpu(method: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path, vocab_size=VOCAB)
    engine = make_engine(tmp_path, async_scheduling="on", speculative_method=method)
    driver = Driver(engine)
    kinds: list[dict[str, Any]] = [kind for name, kind in KINDS.items() if name != "grammar"]
    for stream, kind in enumerate(3 * kinds):
        prompt = np.random.default_rng(stream % 7).integers(3, VOCAB, size=30).tolist()
        settings = {"max_tokens": 60, "ignore_eos": True} | kind
        driver.submit(submit(stream, prompt, **settings))
    for _ in range(WARM_UP):
        driver.step()
    with nothing_waits():
        driver.run()
    for outcome in driver.outcomes.values():
        assert not outcome.error
