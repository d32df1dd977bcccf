"""Which device each rank of a host gets, with a CUDA that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.loop import build_engine
from penstock.engine.torch import engine
from penstock.engine.torch.device import DevicePlace, place_rank, step_threads
from penstock.wire.control import Launch
from tests.engine.torch.harness import make_model


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of CUDA devices; returns those that were made current."""
    current: list[torch.device] = []

    def give(count: int) -> list[torch.device]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return give


def places(ranks: int, **options: Any) -> list[tuple[int, int]]:
    """Device index and sharers of each rank that the host runs."""
    config = ServeConfig(data_parallel_size=ranks, **options)
    found = [place_rank(config, rank) for rank in config.ranks]
    assert all(place.device.type == "cuda" for place in found)
    return [(place.device.index, place.sharers) for place in found]


def test_each_rank_has_its_own_device_where_there_are_enough(devices: Any) -> None:
    devices(4)
    assert places(1) == [(0, 1)]
    assert places(4) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_ranks_beyond_the_devices_share_them_in_turn(devices: Any) -> None:
    devices(2)
    assert places(5) == [(0, 3), (1, 2), (0, 3), (1, 2), (0, 3)]
    devices(1)
    assert places(2) == [(0, 2), (0, 2)]


def test_ranks_count_from_the_first_of_their_host(devices: Any) -> None:
    devices(2)
    other = {"coordinator": "tcp://10.0.0.1:5555", "cluster_key_file": "key"}
    assert places(8, headless=True, data_parallel_start_rank=5, **other) == [(0, 2), (1, 1), (0, 2)]
    assert places(8, data_parallel_size_local=2, **other) == [(0, 1), (1, 1)]


def test_on_ray_a_rank_takes_the_first_device_that_it_sees(devices: Any) -> None:
    devices(1)
    ray = {"coordinator": "tcp://10.0.0.1:5555", "cluster_key_file": "key", "data_parallel_backend": "ray"}
    assert places(3, **ray) == [(0, 1)] * 3
    devices(2)
    assert places(3, **ray) == [(0, 1)] * 3


def test_cpus_are_shared_by_all_ranks(devices: Any) -> None:
    devices(2)
    config = ServeConfig(data_parallel_size=3, device="cpu")
    assert place_rank(config, 1) == DevicePlace(torch.device("cpu"), 3)
    devices(0)
    assert place_rank(ServeConfig(), 0) == DevicePlace(torch.device("cpu"), 1)
    with pytest.raises(
        ConfigError,
        match=r"--device cuda: PyTorch .* (is built without CUDA; install|finds no CUDA device here;)",
    ):
        place_rank(ServeConfig(device="cuda"), 0)


class LoadsError(Exception):
    """The engine has got as far as its weights."""


def test_a_rank_loads_to_its_device_which_is_then_the_current_one(
    devices: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    current = devices(2)

    def load(*arguments: Any, device: torch.device, **options: Any) -> None:
        assert current == [device], "kernels and events would belong to another device"
        raise LoadsError(device)

    monkeypatch.setattr(engine, "PagedModel", load)
    make_model("llama", tmp_path)
    launch = Launch(
        role="engine",
        index=1,
        epoch=0,
        config=ServeConfig(data_parallel_size=2, threads=1),
        run_dir=str(tmp_path),
        model_dir=str(tmp_path),
        tokenizer_dir=str(tmp_path),
        served_model_names=["m"],
        api_server_count=1,
        engine_count=2,
    )
    with pytest.raises(LoadsError) as loads:
        build_engine.build_engine(launch, lambda text, fraction: None)
    assert loads.value.args == (torch.device("cuda", 1),)


def test_a_gpu_leaves_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert (step_threads(ServeConfig(), cpu), step_threads(ServeConfig(), cuda)) == (15, 1)
    assert step_threads(ServeConfig(), cpu, spared=0) == 16
    assert step_threads(ServeConfig(threads=4), cuda) == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    assert step_threads(ServeConfig(), cpu) == 1
