"""Options of the server that would have no effect are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.serve import ServeConfig


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"uds_mode": "600"}, "--uds-mode 600: needs --uds"),
        ({"allowed_methods": ["GET"]}, "--allowed-methods GET: needs --allowed-origins"),
        ({"allowed_headers": ["a", "b"]}, "--allowed-headers a b: needs --allowed-origins"),
        ({"response_store": "off", "response_store_ttl": 1.0}, "--response-store-ttl 1.0: does not go with"),
        (
            {"response_store": "off", "response_store_bytes": 1 << 20},
            "--response-store-bytes 1048576: does not go with --response-store off",
        ),
        ({"synthetic_step_ms": 1.0}, "--synthetic-step-ms 1.0: is for --engine synthetic, not torch"),
        ({"engine": "vllm", "synthetic_fault": "exit@1"}, "--synthetic-fault exit@1: .* synthetic, not vllm"),
        (
            {"engine": "synthetic", "synthetic_acceptance_rate": 0.5},
            "--synthetic-acceptance-rate 0.5: needs --synthetic-tokens-per-step above 1",
        ),
        ({"engine": "synthetic", "threads": 2}, "--threads 2: is for --engine torch, not synthetic"),
        ({"synthetic_dimensions": 8}, "--synthetic-dimensions 8: is for --engine synthetic, not torch"),
        (
            {"engine": "synthetic", "runner": "generate", "synthetic_labels": 8},
            "--synthetic-labels 8: is for --runner pooling or both",
        ),
        ({"runner": "pooling", "enable_lora": True}, "--enable-lora: is for text, and --runner pooling"),
        (
            {"runner": "both", "enable_expert_parallel": True, "data_parallel_size": 2},
            "--enable-expert-parallel: does not go with --r",
        ),
        (
            {"language_model_only": True, "media_workers": 2},
            "--media-workers 2: does not go with --language-model-only",
        ),
        (
            {"media_workers": 0, "allowed_media_domains": ["*"]},
            "--allowed-media-domains \\*: does not go with",
        ),
        ({"media_python": "/usr/bin/python3"}, "--media-python /usr/bin/python3: is for --engine vllm"),
        ({"limit_mm_per_prompt": '{"image": -1}'}, "--limit-mm-per-prompt .*it takes a JSON object such as"),
        ({"mm_processor_kwargs": "[]"}, "--mm-processor-kwargs .*: Expected `object`"),
        ({"otlp_sampling_ratio": 0.5}, "--otlp-sampling-ratio 0.5: needs --otlp-endpoint"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        ServeConfig(**options)
