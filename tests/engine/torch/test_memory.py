"""The KV cache's part of the memory, with a device that only counts; and what the C library does with freed
memory, seen by page faults of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.torch.device import DevicePlace
from penstock.engine.torch.memory import bytes_per_token, cache_budget, num_cache_blocks
from tests.engine.torch.test_attention import SHAPE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WEIGHTS, ACTIVATIONS, OTHERS, TOTAL = 300, 250, 40, 1000

SCRIPT = """
import resource, sys
import numpy as np
from penstock.engine.torch.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2_000_000)  # 16 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
def test_a_second_step_finds_the_memory_of_the_first() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100  # 16 MB of fresh pages are 3,900 faults


class CountingDevice:
    """A device whose tensors are numbers."""

    def __init__(self, weights: int = WEIGHTS) -> None:
        self.allocated = weights
        self.highest = 0
        self.watched = 0

    def total(self) -> int:
        return TOTAL

    def watch_peak(self) -> None:
        self.watched += 1
        self.highest = self.allocated

    def peak(self) -> int:
        return self.highest

    def foreign(self) -> int:
        return OTHERS

    def run(self, *activations: int) -> None:
        for size in activations:
            self.highest = max(self.highest, self.allocated + size)


def budget(sharers: int = 1, weights: int = WEIGHTS, **options: object) -> int:
    device = CountingDevice(weights)
    device.highest = 900  # while loading
    config = ServeConfig(**options)  # type: ignore[arg-type]
    place = DevicePlace(CUDA, sharers)
    found = cache_budget(config, place, lambda: device.run(100, ACTIVATIONS, 20), device)
    assert device.watched == (0 if config.kv_cache_memory else 2), "cached memory is not the cache's"
    return found


def test_a_cache_leaves_room_for_weights_the_largest_step_and_others() -> None:
    assert budget() == 900 - WEIGHTS - ACTIVATIONS - OTHERS
    assert budget(gpu_memory_utilization=0.7) == 700 - WEIGHTS - ACTIVATIONS - OTHERS


def test_engines_that_share_a_device_divide_it() -> None:
    # what an engine alone counts as others' is here the other engine
    assert budget(sharers=2, weights=100) == 450 - 100 - ACTIVATIONS
    with pytest.raises(ConfigError, match=r"0\.9 divided among 2 engines: of 450 bytes .* take 550"):
        budget(sharers=2)


def test_a_size_in_bytes_is_taken_without_a_measurement() -> None:
    assert budget(sharers=3, kv_cache_memory=1 << 20) == 1 << 20


def test_a_cpu_runs_nothing_and_its_ranks_divide_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a step ran")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    alone, shared = (cache_budget(ServeConfig(), DevicePlace(CPU, sharers), refuse) for sharers in (1, 4))
    assert (alone, shared) == (int(0.4 * (1 << 30)), int(0.1 * (1 << 30)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert cache_budget(ServeConfig(), DevicePlace(CPU, 4), refuse) == 4 << 30


def test_a_block_holds_its_tokens_of_all_models() -> None:
    config = ServeConfig(block_size=4, max_num_seqs=1000)
    target, draft = bytes_per_token(SHAPE, torch.float32), bytes_per_token(SHAPE, torch.bfloat16)
    assert (target, draft) == (2 * 2 * 8 * 4, 2 * 2 * 8 * 2)
    room = 11 * 4 * (target + draft)
    assert num_cache_blocks(config, [target, draft], 700, room) == 10  # and the null block
    assert num_cache_blocks(config, [target], 700, room) == 15
    assert num_cache_blocks(config, [target], 9, 1 << 40) == 3000  # never more than all streams need
    with pytest.raises(ConfigError, match=r"\(192 bytes a token\); at least 1536"):
        num_cache_blocks(config, [target, draft], 700, 1535)
