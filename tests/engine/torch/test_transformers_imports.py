"""What an engine imports of transformers and PyTorch before it is ready."""

from __future__ import annotations

import subprocess
import sys

_START = """
import sys
from penstock.config.serve import ServeConfig
from penstock.engine.torch.engine import TorchEngine
TorchEngine(ServeConfig(kv_cache_memory=2**24), *sys.argv[1:], lambda *_: None, tokenizer_dir=sys.argv[1])
dear = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
assert not dear & sys.modules.keys(), dear & sys.modules.keys()
import torch._dynamo
assert torch._dynamo.optimize and torch.compiler.disable(len) is not len
torch.nn.Linear(2, 2).reset_parameters()
assert torch.arange(3, device="meta").device.type == "meta"
"""


def test_the_demo_starts_without_the_compiler() -> None:
    """It doubles what an engine imports. What stood in for it is gone afterwards."""
    ended = subprocess.run(
        [sys.executable, "-c", _START, "penstock/demo"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
