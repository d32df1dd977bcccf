from __future__ import annotations

import pytest

from penstock.config.serve import ServeConfig
from penstock.placement.engine_resources import resources_of

KEY = "/unread"


def on_ray(**options: object) -> ServeConfig:
    given = {"coordinator": "tcp://10.0.0.1:7000", "cluster_key_file": KEY} | options
    return ServeConfig(data_parallel_backend="ray", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "resources"),
    [
        (on_ray(), {"CPU": 1, "GPU": 1}),
        (on_ray(device="cpu"), {"CPU": 1}),
        (on_ray(engine="synthetic"), {"CPU": 1}),
        (on_ray(engine_resources="CPU=4,GPU=0.5,fast-disk=1"), {"CPU": 4, "GPU": 0.5, "fast-disk": 1}),
    ],
)
def test_what_an_engine_takes(config: ServeConfig, resources: dict[str, float]) -> None:
    assert resources_of(config) == resources


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"coordinator": None, "cluster_key_file": None}, "--data-parallel-backend ray: needs --coordinator"),
        ({"data_parallel_size_local": 1}, "--data-parallel-size-local"),
        ({"headless": True}, "--headless"),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "--enable-expert-parallel"),
        ({"api_server_hosts": "head,a"}, "--api-server-hosts head,a: --api-server-count 1 leaves"),
        ({"api_server_hosts": "a", "port": 0}, "--api-server-hosts a: does not go with --port 0"),
        ({"api_server_hosts": "a", "uds": "/s"}, "--api-server-hosts a: does not go with --uds /s"),
    ],
)
def test_options_that_do_not_go_with_a_cluster(options: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        on_ray(**options)


@pytest.mark.parametrize(
    "option",
    [{"ray_address": "10.0.0.1:6379"}, {"engine_resources": "CPU=1"}, {"api_server_hosts": "head"}],
)
def test_options_of_a_cluster_without_one(option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="--data-parallel-backend ray"):
        ServeConfig(**option)  # type: ignore[arg-type]
