"""The KV cache's part of the memory, with a device that only counts; and what the C library does with freed
memory, seen by page faults of a process of its own."""

from __future__ import annotations

import logging
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
WEIGHTS, ACTIVATIONS, LATER, OTHERS, TOTAL = 300, 250, 7, 40, 1000

SCRIPT = """
import resource, sys
import numpy as np
from penstock.metrics.freed_memory import keep_freed_memory

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
    """A device whose tensors are numbers. What the allocator keeps is in use until it is released."""

    def __init__(self, weights: int = WEIGHTS, others: int = OTHERS, shared: bool = False) -> None:
        self.tensors = weights
        self.kept = 0
        self.driver = 0
        """What this process has taken beside its allocator: CUDA graphs."""
        self.others = others
        self.shared = shared
        self.highest = 900  # while loading
        self.watched = 0

    def total(self) -> int:
        return TOTAL

    def free(self) -> int:
        return TOTAL - self.reserved() - self.driver - self.others

    def in_use(self) -> int:
        return self.reserved() if self.shared else TOTAL - self.free()

    def reserved(self) -> int:
        return self.tensors + self.kept

    def allocated(self) -> int:
        return self.tensors

    def release(self) -> None:
        self.kept = 0

    def watch_peak(self) -> None:
        self.watched += 1
        self.release()
        self.highest = self.reserved()

    def peak(self) -> int:
        return self.highest

    def run(self, *activations: int) -> None:
        """Steps, the first of which leaves pieces that the next one cannot use."""
        for size in activations:
            self.kept = max(self.kept, size)
            self.highest = max(self.highest, self.reserved())


def budget(
    sharers: int = 1, weights: int = WEIGHTS, others: int = OTHERS, graphs: int = 0, **options: object
) -> int:
    device = CountingDevice(weights, others)
    config = ServeConfig(**options)  # type: ignore[arg-type]
    place = DevicePlace(CUDA, sharers)
    found = cache_budget(
        config, place, lambda: device.run(100, ACTIVATIONS, 20), lambda memory: graphs, LATER, device
    )
    assert device.watched == (0 if config.kv_cache_memory else 1)
    assert device.kept == 0, "cached memory is not the cache's"
    return found


def test_a_cache_leaves_room_for_weights_the_largest_step_and_others() -> None:
    assert budget() == 900 - WEIGHTS - ACTIVATIONS - LATER - OTHERS
    assert budget(gpu_memory_utilization=0.7) == 700 - WEIGHTS - ACTIVATIONS - LATER - OTHERS


def test_the_log_has_the_parts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        size = budget(graphs=30)
    assert [record.message for record in caplog.records] == [
        "of 1000 bytes on cuda:0: weights and largest step 550 bytes, CUDA graphs 30 bytes, penalties 7 "
        f"bytes, others 40 bytes, KV cache {size} bytes"
    ]


def test_a_cache_leaves_room_for_graphs() -> None:
    assert budget() - budget(graphs=30) == 30
    assert budget(sharers=2, weights=100) - budget(sharers=2, weights=100, graphs=30) == 30


def test_engines_that_share_a_device_divide_it() -> None:
    # what an engine alone counts as others' is here the other engine
    assert budget(sharers=2, weights=100) == 450 - 100 - ACTIVATIONS - LATER
    with pytest.raises(
        ConfigError, match=r"0\.9 divided among 2 engines: nothing is left .* 450 bytes; .* 550"
    ):
        budget(sharers=2)


@pytest.mark.parametrize("sharers", [1, 2])
def test_a_cache_is_never_more_than_what_is_free_beside_the_largest_step(sharers: int) -> None:
    """Other processes may have the rest."""
    others = 610
    device = CountingDevice(100, others)
    size = budget(sharers=sharers, weights=100, others=others, graphs=5, gpu_memory_utilization=1.0)
    device.tensors += size
    device.run(ACTIVATIONS)
    assert device.free() == 5 + LATER


def test_a_full_device_is_an_error_that_says_who_has_it() -> None:
    with pytest.raises(ConfigError) as raised:
        budget(others=640, graphs=30)
    text = str(raised.value)
    assert text.startswith(
        "--gpu-memory-utilization 0.9: nothing is left for the KV cache. Of 1000 bytes on cuda:0 "
    )
    assert "this engine may take 900 bytes" in text
    assert f"its weights and largest step take {WEIGHTS + ACTIVATIONS} bytes, CUDA graphs 30 bytes" in text
    assert "other processes (nvidia-smi lists them) have 640 bytes, which leaves 360 bytes" in text
    assert "--max-num-batched-tokens or --max-num-seqs, or end other processes" in text


def test_a_size_in_bytes_is_taken_without_a_measurement() -> None:
    assert budget(sharers=3, kv_cache_memory=1 << 20) == 1 << 20


def test_a_cpu_runs_nothing_and_its_ranks_divide_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise AssertionError("a step ran")

    def found(sharers: int) -> int:
        return cache_budget(ServeConfig(), DevicePlace(CPU, sharers), lambda: None, refuse, 1 << 40)

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    alone, shared = found(1), found(4)
    assert (alone, shared) == (int(0.4 * (1 << 30)), int(0.1 * (1 << 30)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert found(4) == 4 << 30


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
