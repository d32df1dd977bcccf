"""The device of an engine, when several engines run on one host."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig


@dataclass(slots=True, frozen=True)
class DevicePlace:
    """A rank's device, and how many of its host's ranks have the same one."""

    device: torch.device
    """A CUDA device has its index."""
    sharers: int
    """This rank included, at least 1: each takes its part of the memory."""


def device_name(device: torch.device) -> str:
    """What metrics and status call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def no_cuda() -> str:
    """Why there is no CUDA device, and what helps."""
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA; install a build for CUDA, in a clone by "
            "make serve TORCH_INDEX=none"
        )
    return f"PyTorch {torch.__version__} finds no CUDA device here; nvidia-smi shows what the driver has"


def place_rank(config: ServeConfig, rank: int) -> DevicePlace:
    """The device of a data-parallel rank: the host's ranks take its CUDA devices in turn.

    On a Ray cluster an engine sees the devices that Ray gives it, and takes the first: who else has it is
    unknown. Raises ConfigError when CUDA is requested and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError(f"--device cuda: {no_cuda()}")
    on_ray = config.data_parallel_backend == "ray"
    ranks = range(rank, rank + 1) if on_ray else config.ranks
    if not available or config.device == "cpu":
        return DevicePlace(torch.device("cpu"), len(ranks))
    devices = torch.cuda.device_count()
    index = (rank - ranks.start) % devices
    return DevicePlace(torch.device("cuda", index), len(ranks[index::devices]))


def step_threads(config: ServeConfig, device: torch.device, spared: int = 1) -> int:
    """CPU threads of a step, on all cores but ``spared`` ones, for API servers. A GPU's steps copy small
    arrays on the host: more than one thread would wait, spinning, on cores that API servers need."""
    if config.threads:
        return config.threads
    return 1 if device.type == "cuda" else max(1, len(os.sched_getaffinity(0)) - spared)
