"""What the options of ``penstock serve`` need and exclude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.options.hosts import HEAD
from penstock.config.rules.rule import Rule, excludes, needs

if TYPE_CHECKING:
    from penstock.config.serve import ServeConfig

_ATTACHED = "does not go with --attach {0.attach}: "
_NO_CLUSTER = "needs --coordinator tcp://HOST:PORT, where engines join the fleet"
_NO_MODEL = "is for --engine torch, not synthetic: it runs no model"

NOT_OF_VLLM = {
    "device": "vLLM runs on the device that it was built for",
    "threads": "set VLLM_CPU_OMP_THREADS_BIND or OMP_NUM_THREADS, as for vLLM",
    "batch_invariant": "set VLLM_BATCH_INVARIANT=1, as for vLLM",
    "max_prefill_delay": "vLLM's scheduler decides how prompts and decodes share a step",
}
"""Options of the torch engine that others do not have, and what takes their place."""

WITH_ATTACH: tuple[Rule[ServeConfig], ...] = (
    excludes(
        "attach",
        lambda config: config.model is None,
        "name MODEL, the engines' model; its config and tokenizer are needed here, too",
    ),
    excludes("engine", lambda config: config.engine == "synthetic", _ATTACHED + "it attaches vLLM's engines"),
    excludes(
        "data_parallel_start_rank",
        lambda config: True,
        _ATTACHED + "it is an option of the engines' commands",
    ),
    excludes("headless coordinator", lambda config: True, _ATTACHED + "attached engines may run on any host"),
    excludes("data_parallel_backend vllm_command", lambda config: True, _ATTACHED + "it starts no engines"),
    excludes(
        "enable_expert_parallel",
        lambda config: True,
        _ATTACHED + "it is an option of the engines: give it to them, or behind --",
    ),
)
"""Rules of engines that run elsewhere."""

WITHOUT_ATTACH: tuple[Rule[ServeConfig], ...] = (
    excludes(
        "print_engine_command", lambda config: True, "needs --attach HOST:PORT, where the engines connect"
    ),
    needs(
        "headless data_parallel_start_rank cluster_key_file",
        lambda config: config.coordinator is not None,
        _NO_CLUSTER,
    ),
    needs(
        "data_parallel_size_local",
        lambda config: config.coordinator is not None or len(config.ranks) == config.data_parallel_size,
        _NO_CLUSTER,
    ),
    needs(
        "coordinator",
        lambda config: config.cluster_key_file is not None,
        "needs --cluster-key-file; penstock keys cluster FILE makes one",
    ),
    excludes(
        "enable_expert_parallel",
        lambda config: config.headless or len(config.ranks) < config.data_parallel_size,
        "engines in lock-step run on one host, all of them",
    ),
    needs(
        "data_parallel_start_rank engine_host",
        lambda config: config.headless,
        "is for a --headless host; the head runs the first ranks itself",
    ),
)
"""Rules of engines that this server starts."""

RULES: tuple[Rule[ServeConfig], ...] = (
    needs(
        "engine_args",
        lambda config: config.engine == "vllm",
        "these are for --engine vllm, not {0.engine}",
    ),
    needs("vllm_command", lambda config: config.engine == "vllm", "is for --engine vllm, not {0.engine}"),
    excludes(
        "enable_expert_parallel",
        lambda config: config.engine == "vllm",
        "does not go with --engine vllm, whose engines are independent of one another; behind -- it splits "
        "experts over the workers of one engine, and engines of --attach step together",
    ),
    needs(
        "synthetic_step_ms synthetic_tokens_per_step synthetic_acceptance_rate synthetic_fault "
        "synthetic_prefill_tokens_per_s synthetic_script synthetic_dimensions synthetic_labels "
        "synthetic_image_tokens synthetic_encode_ms",
        lambda config: config.engine == "synthetic",
        "is for --engine synthetic, not {0.engine}",
    ),
    excludes(
        "synthetic_tokens_per_step",
        lambda config: config.synthetic_script is not None,
        "a script's replies have the tokens-per-step of their pace",
    ),
    needs(
        "synthetic_dimensions synthetic_labels",
        lambda config: config.runner != "generate",
        "is for --runner pooling or both",
    ),
    needs(
        "synthetic_acceptance_rate",
        lambda config: config.synthetic_tokens_per_step > 1,
        "needs --synthetic-tokens-per-step above 1",
    ),
    # -- HTTP
    needs("uds_mode", lambda config: config.uds is not None, "needs --uds, the socket that has it"),
    needs(
        "allowed_methods allowed_headers",
        lambda config: config.allowed_origins is not None,
        "needs --allowed-origins, the pages that may ask",
    ),
    needs(
        "allow_credentials",
        lambda config: config.allowed_origins is not None and "*" not in config.allowed_origins,
        "name the pages in --allowed-origins; without, none could act in its visitor's name, with * every "
        "one could",
    ),
    needs(
        "enable_expert_parallel",
        lambda config: config.data_parallel_size > 1,
        "experts are split over the engines of --data-parallel-size, which is 1",
    ),
    needs(
        "stream_interval_ms",
        lambda config: config.stream_interval == "auto",
        "events are paced by tokens (--stream-interval) or by time, not by both",
    ),
    needs(
        "response_store_dir",
        lambda config: config.response_store == "disk",
        "is for --response-store disk, not {0.response_store}",
    ),
    excludes(
        "response_store_bytes response_store_ttl",
        lambda config: config.response_store == "off",
        "does not go with --response-store off",
    ),
    # -- the torch engine
    *(
        excludes(field, lambda config: config.engine == "vllm", f"is not for vLLM's engines: {instead}")
        for field, instead in NOT_OF_VLLM.items()
    ),
    excludes(
        "batch_invariant max_prefill_delay threads", lambda config: config.engine == "synthetic", _NO_MODEL
    ),
    excludes(
        "runner",
        lambda config: config.runner == "both" and (config.engine == "vllm" or config.attach is not None),
        "both is not for vLLM's engines: one makes text, or vectors",
    ),
    excludes(
        "enable_expert_parallel enable_lora speculative_method synthetic_script",
        lambda config: config.runner == "pooling",
        "is for text, and --runner pooling serves none",
    ),
    excludes(
        "enable_expert_parallel",
        lambda config: config.runner == "both",
        "does not go with --runner both: the engines' steps of vectors are not in lock-step",
    ),
    excludes("batch_invariant", lambda config: config.enable_lora, "does not go with --enable-lora"),
    excludes(
        "batch_invariant",
        lambda config: config.enable_expert_parallel,
        "does not go with --enable-expert-parallel",
    ),
    excludes(
        "batch_invariant",
        lambda config: config.block_size % 16 != 0,
        "does not go with --block-size {0.block_size}, which is no multiple of 16",
    ),
    # Others may stand behind -- for vLLM's engine: adapters.lora_modules reads these, and checks all.
    needs(
        "lora_modules lora_dir max_loras max_lora_rank max_cpu_loras",
        lambda config: config.enable_lora or config.engine == "vllm",
        "needs --enable-lora",
    ),
    # -- speculative decoding
    excludes("speculative_method", lambda config: config.engine == "synthetic", _NO_MODEL),
    excludes(
        "speculative_method",
        lambda config: config.engine == "vllm",
        "is for --engine torch, not vllm: give --speculative-config behind --",
    ),
    excludes(
        "speculative_method",
        lambda config: config.speculative_method == "draft" and config.draft_model is None,
        "needs --draft-model",
    ),
    needs(
        "draft_model",
        lambda config: config.speculative_method == "draft",
        "needs --speculative-method draft",
    ),
    excludes(
        "speculative_tokens",
        lambda config: config.speculative_method == "none",
        "needs --speculative-method ngram, suffix or draft",
    ),
    # -- pictures
    excludes(
        "media_workers allowed_media_domains allowed_local_media_path media_python mm_processor_kwargs "
        "synthetic_image_tokens",
        lambda config: config.language_model_only,
        "does not go with --language-model-only, which takes no pictures",
    ),
    excludes(
        "allowed_media_domains allowed_local_media_path media_python mm_processor_kwargs",
        lambda config: config.media_workers == 0,
        "does not go with --media-workers 0, which takes no pictures",
    ),
    needs("media_python", lambda config: config.engine == "vllm", "is for --engine vllm, not {0.engine}"),
    # -- a Ray cluster
    needs(
        "ray_address engine_resources api_server_hosts",
        lambda config: config.data_parallel_backend == "ray",
        "is for a Ray cluster, --data-parallel-backend ray",
    ),
    needs(
        "data_parallel_backend",
        lambda config: config.coordinator is not None,
        "needs --coordinator tcp://HOST:PORT, where the cluster's machines reach this one",
    ),
    excludes(
        "headless data_parallel_size_local enable_expert_parallel",
        lambda config: config.data_parallel_backend == "ray",
        "does not go with --data-parallel-backend ray, which places all engines",
    ),
    excludes(
        "api_server_hosts",
        lambda config: config.api_server_count < len(config.api_servers),
        "--api-server-count {0.api_server_count} leaves hosts without one",
    ),
    excludes(
        "api_server_hosts",
        lambda config: {*config.api_servers} != {HEAD} and config.port == 0,
        "does not go with --port 0; every host listens on the same port",
    ),
    excludes(
        "api_server_hosts",
        lambda config: {*config.api_servers} != {HEAD} and config.uds is not None,
        "does not go with --uds {0.uds}; every host listens on the same port",
    ),
)
"""Rules of all engines."""
