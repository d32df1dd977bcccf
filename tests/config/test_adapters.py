"""Options of adapters that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.serve import ServeConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_modules": ["a=/a"]}, "--lora-modules a=/a: needs --enable-lora"),
        ({"lora_dir": "/d"}, "--lora-dir /d: needs --enable-lora"),
        ({"max_loras": 2}, "--max-loras 2: needs --enable-lora"),
        ({"max_lora_rank": 64}, "--max-lora-rank 64: needs --enable-lora"),
        ({"max_cpu_loras": 8}, "--max-cpu-loras 8: needs --enable-lora"),
        (
            {"enable_lora": True, "max_loras": 5, "max_cpu_loras": 4},
            "--max-cpu-loras 4: it must be at least --max-loras, which is 5",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    for engine in ("torch", "synthetic"):
        with pytest.raises(ValueError, match=message):
            ServeConfig(engine=engine, **options)
    assert ServeConfig(engine="vllm", **options).engine == "vllm"  # others may stand behind --


def test_experts_over_engines_go_with_adapters() -> None:
    config = ServeConfig(enable_lora=True, enable_expert_parallel=True, data_parallel_size=2)
    assert config.enable_lora
