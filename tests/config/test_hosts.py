"""Options of a fleet over several hosts: what goes together."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.serve import ServeConfig

FLEET: dict[str, Any] = {"coordinator": "tcp://head:5000", "cluster_key_file": "k", "data_parallel_size": 4}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"data_parallel_size": 4}, range(4)),
        (FLEET, range(4)),
        (FLEET | {"data_parallel_size_local": 0}, range(0)),
        (FLEET | {"data_parallel_size_local": 2}, range(2)),
        (FLEET | {"headless": True, "data_parallel_start_rank": 2}, range(2, 4)),
        (
            FLEET | {"headless": True, "data_parallel_start_rank": 1, "data_parallel_size_local": 2},
            range(1, 3),
        ),
    ],
)
def test_ranks_of_this_host(options: dict[str, Any], ranks: range) -> None:
    assert ServeConfig(**options).ranks == ranks


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"headless": True}, "--headless: needs --coordinator"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "-local 1: needs --coordinator"),
        ({"data_parallel_size": 2, "data_parallel_start_rank": 1}, "-start-rank 1: needs --coordinator"),
        ({"cluster_key_file": "k"}, "--cluster-key-file k: needs --coordinator"),
        ({"coordinator": "tcp://head:5000"}, "penstock keys cluster FILE makes one"),
        (FLEET | {"data_parallel_start_rank": 1}, "--data-parallel-start-rank 1: is for a --headless host"),
        (FLEET | {"engine_host": "10.0.0.1"}, "--engine-host 10.0.0.1: is for a --headless host"),
        (FLEET | {"headless": True, "data_parallel_start_rank": 4}, "ranks are 0 to 3"),
        (FLEET | {"headless": True, "data_parallel_size_local": 0}, "at least one"),
        (FLEET | {"data_parallel_size_local": 5}, "--data-parallel-size-local 5: ranks are 0 to 3"),
        (FLEET | {"headless": True, "enable_expert_parallel": True}, "one host, all of them"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ServeConfig(**options)
