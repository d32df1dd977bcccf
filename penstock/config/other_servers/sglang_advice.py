"""What the most used flags of SGLang's server are here."""

from __future__ import annotations

from penstock.config.other_servers.known_flag import Advice, EngineFlag, IgnoredFlag, MappedFlag, Unsupported

_TENSOR_PARALLEL = EngineFlag("--tensor-parallel-size", "1")
_EXPERTS = EngineFlag("--enable-expert-parallel", "1", alone=True)
_SPECULATIVE = Unsupported(
    "vLLM's engine has --speculative-config behind --, the torch engine --speculative-method ngram, suffix "
    "and draft"
)
_ATTENTION = Unsupported(
    "--data-parallel-size starts engines of their own, with --tensor-parallel-size devices each"
)

ADVICE: dict[str, tuple[str, Advice]] = {
    "--model-path": ("1", MappedFlag("MODEL", "the first argument")),
    "--tokenizer-path": ("1", MappedFlag("--tokenizer")),
    "--context-length": ("1", MappedFlag("--max-model-len")),
    "--mem-fraction-static": ("1", MappedFlag("--gpu-memory-utilization")),
    "--max-running-requests": ("1", MappedFlag("--max-num-seqs", "per engine")),
    "--max-queued-requests": ("1", MappedFlag("--max-num-queued-reqs")),
    "--chunked-prefill-size": ("1", MappedFlag("--max-num-batched-tokens", "prefill and decode together")),
    "--max-prefill-tokens": ("1", MappedFlag("--max-num-batched-tokens", "prefill and decode together")),
    "--page-size": ("1", MappedFlag("--block-size")),
    "--random-seed": ("1", MappedFlag("--seed")),
    "--dp": ("1", MappedFlag("--data-parallel-size")),
    "--dp-size": ("1", MappedFlag("--data-parallel-size")),
    "--watchdog-timeout": ("1", MappedFlag("--engine-hang-timeout")),
    "--disable-radix-cache": ("0", MappedFlag("--no-enable-prefix-caching")),
    "--disable-overlap-schedule": ("0", MappedFlag("--no-async-scheduling")),
    "--log-level-http": ("1", MappedFlag("--access-log", "none, errors or all")),
    "--lora-paths": ("+", MappedFlag("--enable-lora --lora-modules", "each NAME=PATH")),
    "--max-loras-per-batch": ("1", MappedFlag("--max-loras")),
    "--max-loaded-loras": ("1", MappedFlag("--max-cpu-loras")),
    "--lora-backend": ("1", IgnoredFlag("there is one")),
    "--lora-eviction-policy": ("1", IgnoredFlag("adapters stay loaded until they are unloaded")),
    "--enable-metrics": ("0", IgnoredFlag("/metrics is always served")),
    "--enable-cache-report": ("0", IgnoredFlag("usage always has the cached tokens")),
    "--skip-server-warmup": ("0", IgnoredFlag("there is no warm-up request")),
    "--disable-cuda-graph": ("0", IgnoredFlag("the torch engine decides what it records as CUDA graphs")),
    "--cuda-graph-max-bs": ("1", IgnoredFlag("the torch engine decides what it records as CUDA graphs")),
    "--grammar-backend": ("1", IgnoredFlag("grammars are always those of llguidance")),
    "--sampling-backend": ("1", IgnoredFlag("there is one")),
    "--schedule-conservativeness": ("1", IgnoredFlag("preempted requests are computed again")),
    "--enable-mixed-chunk": ("0", IgnoredFlag("--max-prefill-delay bounds steps with prompts")),
    "--tp": ("1", _TENSOR_PARALLEL),
    "--tp-size": ("1", _TENSOR_PARALLEL),
    "--pp-size": ("1", EngineFlag("--pipeline-parallel-size", "1")),
    "--ep": ("1", _EXPERTS),
    "--ep-size": ("1", _EXPERTS),
    "--expert-parallel-size": ("1", _EXPERTS),
    "--json-model-override-args": ("1", EngineFlag("--hf-overrides")),
    "--enable-dp-attention": ("0", _ATTENTION),
    "--speculative-algorithm": ("1", _SPECULATIVE),
    "--speculative-draft-model-path": ("1", _SPECULATIVE),
    "--enable-torch-compile": ("0", IgnoredFlag("Penstock's own engines compile nothing")),
    "--nsa-prefill-backend": ("1", IgnoredFlag("the torch engine has one")),
    "--nsa-decode-backend": ("1", IgnoredFlag("the torch engine has one")),
    "--enable-multimodal": ("0", IgnoredFlag("every model that takes pictures is served with them")),
    "--language-only": ("0", MappedFlag("--language-model-only")),
    "--limit-mm-data-per-request": ("1", MappedFlag("--limit-mm-per-prompt")),
    "--media-url-max-file-size-mb": (
        "1",
        MappedFlag("--media-max-bytes", "in bytes, with units: 32Mi", unit="Mi"),
    ),
    "--mm-preprocess-cache-size-mb": (
        "1",
        MappedFlag("--media-cache", "in bytes, with units: 4Gi", unit="Mi"),
    ),
    "--mm-processor-worker-num": ("1", MappedFlag("--media-workers")),
    "--mm-io-worker-num": ("1", MappedFlag("--media-workers")),
    "--dist-init-addr": ("1", Unsupported("engines on other hosts join at --coordinator tcp://HOST:PORT")),
    "--schedule-policy": ("1", Unsupported("--scheduling-policy has fcfs and priority")),
    "--is-embedding": ("0", MappedFlag("--runner pooling")),
    "--log-requests": ("0", Unsupported("requests are not logged; --access-log all logs one line for each")),
}
"""Number of values, and advice, by name. A name that vLLM has as well stands in its table. Names without
advice: ``sglang_names.json``."""
