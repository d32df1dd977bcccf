"""Every metric family of vLLM with its labels (vllm/v1/metrics/loggers.py), and why some are not served."""

from __future__ import annotations

ENGINE = ("model_name", "engine")

SERVED: dict[str, tuple[str, ...]] = {
    "vllm:num_requests_running": ENGINE,
    "vllm:num_requests_waiting": ENGINE,
    "vllm:num_requests_waiting_by_reason": (*ENGINE, "reason"),
    "vllm:engine_sleep_state": (*ENGINE, "sleep_state"),
    "vllm:kv_cache_usage_perc": ENGINE,
    "vllm:prefix_cache_queries": ENGINE,
    "vllm:prefix_cache_hits": ENGINE,
    "vllm:external_prefix_cache_queries": ENGINE,
    "vllm:external_prefix_cache_hits": ENGINE,
    "vllm:mm_cache_queries": ENGINE,
    "vllm:mm_cache_hits": ENGINE,
    "vllm:num_preemptions": ENGINE,
    "vllm:prompt_tokens": ENGINE,
    "vllm:prompt_tokens_by_source": (*ENGINE, "source"),
    "vllm:prompt_tokens_cached": ENGINE,
    "vllm:generation_tokens": ENGINE,
    "vllm:request_success": (*ENGINE, "finished_reason"),
    "vllm:request_prompt_tokens": ENGINE,
    "vllm:request_generation_tokens": ENGINE,
    "vllm:iteration_tokens_total": ENGINE,
    "vllm:request_max_num_generation_tokens": ENGINE,
    "vllm:request_params_n": ENGINE,
    "vllm:request_params_max_tokens": ENGINE,
    "vllm:time_to_first_token_seconds": ENGINE,
    "vllm:inter_token_latency_seconds": ENGINE,
    "vllm:request_time_per_output_token_seconds": ENGINE,
    "vllm:e2e_request_latency_seconds": ENGINE,
    "vllm:request_queue_time_seconds": ENGINE,
    "vllm:request_inference_time_seconds": ENGINE,
    "vllm:request_prefill_time_seconds": ENGINE,
    "vllm:request_decode_time_seconds": ENGINE,
    "vllm:request_num_preemptions": ENGINE,
    "vllm:request_prefill_kv_computed_tokens": ENGINE,
    "vllm:lora_requests_info": ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    "vllm:cache_config_info": ("engine", "block_size", "num_gpu_blocks"),
}

SPECULATION: dict[str, tuple[str, ...]] = {
    "vllm:spec_decode_num_drafts": ENGINE,
    "vllm:spec_decode_num_draft_tokens": ENGINE,
    "vllm:spec_decode_num_accepted_tokens": ENGINE,
    "vllm:spec_decode_num_accepted_tokens_per_pos": (*ENGINE, "position"),
}
"""Those of vllm/v1/spec_decode/metrics.py."""

NOT_SERVED = {
    "vllm:num_requests_kv_fetch_by_stage": "stages of a KV connector, which vLLM keeps to itself",
    "vllm:corrupted_requests": "only with a debugging variable of vLLM's",
    "vllm:watermark_requests": "there is no watermarking",
    "vllm:prompt_tokens_cached_by_source": "prompt_tokens_by_source tells local from external ones",
    "vllm:admission_rejections": "penstock:requests_refused",
    "vllm:kv_block_lifetime_seconds": "only with an option of vLLM's",
    "vllm:kv_block_idle_before_evict_seconds": "only with an option of vLLM's",
    "vllm:kv_block_reuse_gap_seconds": "only with an option of vLLM's",
}
